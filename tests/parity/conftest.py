"""The RPC group of the ranks, for the mpirpc side."""

from tests._ranks.world import rpc_world

__all__ = ["rpc_world"]
