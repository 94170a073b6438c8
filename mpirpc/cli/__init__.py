"""The sub-commands of ``python -m mpirpc``, one module each: ``HELP``, ``add_arguments`` and ``run``."""
