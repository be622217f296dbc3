"""graphs/spmd/sharding.py: strategies shard one letter at a time, over operands of the ranks that an operator takes."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from npucompile.graphs import ops
from npucompile.graphs.primitive import TABLE
from npucompile.graphs.spmd.sharding import placement, register_all, strategies


def test_one_strategy_a_letter_after_the_whole() -> None:
    R = Replicate()
    assert strategies(ops.linear, [2, 2]) == [
        ([R], [R, R]),
        ([Shard(0)], [Shard(0), R]),
        ([Partial()], [Shard(1), Shard(1)]),
        ([Shard(1)], [R, Shard(0)]),
    ]


def test_the_rest_gives_a_strategy_a_dimension() -> None:
    assert strategies(ops.rms_norm, [3, 1])[1:] == [([Shard(i)], [Shard(i), Replicate()]) for i in range(2)]
    assert len(strategies(ops.rms_norm, [1, 1])) == 1


def test_pools_and_tokens_are_never_sharded() -> None:
    """Pages, slots and positions are never sharded: DTensor would gather or sum a sharded pool, with wrong results and no error."""
    legal = strategies(ops.cache_write, [4, 4, 3, 3, 1])
    assert [operands[0] for _, operands in legal] == [Replicate(), Shard(2)]
    assert all(operands[4] == Replicate() for _, operands in legal)


def test_only_results_are_partial() -> None:
    sums = frozenset("k")
    assert placement(("t", "k"), "k", sums, result=False) == Shard(1)
    assert placement(("t",), "k", sums, result=False) == Replicate()
    assert placement(("t",), "k", sums, result=True) == Partial()
    assert placement(("t",), "n", sums, result=True) == Replicate()


def test_registering_again_is_nothing() -> None:
    register_all()
    register_all()
    assert torch.ops.npuc.linear.default is TABLE["linear"].op
