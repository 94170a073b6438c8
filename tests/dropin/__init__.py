"""Programs for ``torch.distributed.rpc``; tests/test_dropin.py runs them on torch and on mpirpc.

Each is one file in the manner of a published tutorial, starts its own processes by
``torch.multiprocessing.spawn`` (``PROCESSES`` of them), and prints figures that depend on its seeds only.
"""
