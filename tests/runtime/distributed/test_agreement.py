"""runtime/distributed/agreement.py: every rank hears the same of each round, however late the others come."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from npucompile.graphs.errors import LoweringError
from npucompile.runtime.distributed.agreement import Agreement


def test_all_ranks_hear_the_reason_of_the_first_that_could_not() -> None:
    rounds = [["", "", ""], ["", "no memory", "no tiling"], ["late", "", ""], ["", "", ""]]
    store = HashStore()

    def rank(number: int) -> list[str]:
        agree, heard = Agreement(store, number, 3), list[str]()
        for reasons in rounds:
            time.sleep(0.02 * number)
            heard.append(agree(reasons[number]))
        return heard

    with ThreadPoolExecutor(3) as threads:
        heard = [thread.result(30) for thread in [threads.submit(rank, number) for number in range(3)]]
    assert heard == [["", "rank 1: no memory", "rank 0: late", ""]] * 3


def test_a_rank_that_says_nothing_is_named() -> None:
    with pytest.raises(LoweringError, match=r"ranks 0, 2 have not answered within 0\.05 s; rank 1: no memory"):
        Agreement(HashStore(), 1, 3)("no memory", 0.05)
