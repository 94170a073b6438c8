"""Small MPI suites that go wrong on purpose; tests/test_in_step.py runs them by name."""
