"""Compares what a prefix index says with page tables and pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .pools import Keeper, OwnershipError, PagePool, StateSlotPool
from .prefix_index import PrefixIndex
from .share import Share


def check_prefixes(prefixes: PrefixIndex, shares: Mapping[str, Share], pages: PagePool, state_slots: StateSlotPool) -> None:
    """Counts what is kept, and by whom it is used, once more from page tables and tree.

    Raises:
        OwnershipError: a count differs.
    """
    users = Counter(block for path in prefixes.paths().values() for block in path)
    blocks = {*prefixes.blocks(), *users}
    states = [block.checkpoint for block in blocks if block.checkpoint]
    own_states = [c for share in shares.values() for c in (share.source, *share.written.values()) if c is not None]
    by_index = {
        "users": {block: block.users for block in blocks if block.users},
        "pages": sorted(block.page for block in blocks),
        "unused pages": prefixes.num_unused,
        "shared pages": prefixes.num_shared,
        "slots": sorted({c.slot for c in (*states, *own_states)}),
        "checkpoints": prefixes.num_checkpoints,
        "held": prefixes.num_held,
        "tables": {name: list(share.table[: len(prefixes.path(name))]) for name, share in shares.items()},
    }
    expected = {
        "users": dict(users),
        "pages": sorted(pages.owned(Keeper.PREFIXES)),
        "unused pages": len(blocks) - len(users),
        "shared pages": users.total() - len(users),
        "slots": sorted(state_slots.owned(Keeper.PREFIXES)),
        "checkpoints": len({*states, *own_states}),
        "held": len({*own_states}),
        "tables": {name: [block.page for block in path] for name, path in prefixes.paths().items()},
    }
    for what, value in expected.items():
        if by_index[what] != value:
            raise OwnershipError(f"{what} of the prefix cache are {by_index[what]}; by requests and pools they are {value}")
