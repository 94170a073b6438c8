"""Machinery of mpirpc: private. A file imports only from lower layers; see tests/test_layers.py."""
