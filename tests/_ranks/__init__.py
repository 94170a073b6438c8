"""How tests run on several MPI ranks: starting them, keeping them in step, ending them when stuck.

| file | its one job |
|---|---|
| launch.py | `run_ranks`: start a program on n ranks with a time limit, from a test without ranks |
| exchange.py | every rank tells every other rank something, without a blocking MPI call |
| watchdog.py | show all stacks and end the job when a rank is stuck |
| in_step.py | the pytest plugin: one verdict per test for all ranks, one rank that prints |
| results.py | what the ranks found out, written line by line for the test that started them |
| world.py | the fixture `rpc_world`: an RPC group around each test, closed and checked for leaks |
| samples/ | small suites that go wrong on purpose; tests/test_in_step.py runs them |
"""
