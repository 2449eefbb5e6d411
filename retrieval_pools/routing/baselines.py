"""Groupings that look at nothing: one group for all, and groups by a hash of the id (LASER's GRP and RRP)."""

import hashlib

GLOBAL_GROUP = "global"


def random_group(entity_id: str | int, num_groups: int, seed: int) -> str:
    """Group of an entity by a seeded hash of its id: the same in every process, for ids never seen as well.

    Parameters
    ----------
    entity_id : str or int
    num_groups : int
        How many groups there are, at least 1.
    seed : int
        Another seed gives an unrelated grouping.

    Returns
    -------
    str
        "random/0" to "random/<num_groups - 1>".
    """
    digest = hashlib.blake2b(f"{seed}:{entity_id}".encode(), digest_size=8).digest()
    return f"random/{int.from_bytes(digest, 'little') % num_groups}"
