"""runtime/scheduler/prefix_check.py: what the index says must be what page tables and pools say."""

from __future__ import annotations

import pytest
from support import toy_device as toy

from npucompile.runtime.request import Request
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from npucompile.runtime.scheduler.pools import Keeper, OwnershipError
from npucompile.runtime.scheduler.prefix_check import check_prefixes


def test_a_page_that_only_one_side_knows_is_found() -> None:
    served = toy.serving(prefix_cache=PrefixCacheSettings(), refresh_every_s=None)
    served.submit(Request("a", tuple(range(10)), 3))
    served.drain()
    (manager,) = served.engine.stepper.cache_managers
    assert manager.prefixes is not None
    arguments = manager.prefixes, manager._shares, manager.pages, manager.state_slots
    check_prefixes(*arguments)
    manager.pages.allocate(1, Keeper.PREFIXES)
    with pytest.raises(OwnershipError, match=r"pages of the prefix cache are .*; by requests and pools they are"):
        check_prefixes(*arguments)
