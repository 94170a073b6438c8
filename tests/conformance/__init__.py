"""torch's own RPC test suite, run against mpirpc on MPI ranks. How to run it, and what it proves: README.md.

The tests stay in the installed torch; nothing of them is copied. One long-lived ``mpirun`` job runs test
after test, each test method in every rank.

| file | its one job |
|---|---|
| `__main__.py` | the command line: which tests, what to print, exit status |
| suite.csv, plan.py | every test of the suite: ranks, category, whether it can apply; choosing among them |
| outcomes.csv, outcomes.py | how each test went when last recorded, why it does not pass; what is worse |
| job.py | one mpirun: starting its ranks, talking to them over a Unix socket, outcomes, watchdog |
| runner.py | test after test, job after job; a second try alone |
| worker.py | what runs in each rank |
| torch_suite.py | the suite's classes with our fixtures mixed in; its globals put back before each test |
| facades.py | modules of torch's names whose contents are mpirpc's |
| names.py, name_*.py | torch's private names that the tests use, answered in terms of mpirpc |
"""
