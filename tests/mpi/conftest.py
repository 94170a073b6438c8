"""Every test of this folder may ask for ``rpc_world``."""

from tests._ranks.world import rpc_world

__all__ = ["rpc_world"]
