"""Ids that the RRef tests share: rref 1.1, owned by rank 0; fork tree A (1.2) -> Y (1.3) -> Z (2.1)."""

from mpirpc._core.messages import ForkId, RRefId

OWNER, CREATOR, OTHER, THIRD = 0, 1, 2, 3
"""Ranks: who has the value, who made it by ``remote``, and two more users."""

RREF = RRefId(CREATOR, 1)
FORK_A = ForkId(CREATOR, 2)
FORK_Y = ForkId(CREATOR, 3)
FORK_Z = ForkId(OTHER, 1)

LOCAL_RREF = RRefId(OWNER, 1)
"""A value that its owner made itself."""

OWNER_FORK = ForkId(OWNER, 2)
"""A fork that the owner records when it sends its own RRef."""
