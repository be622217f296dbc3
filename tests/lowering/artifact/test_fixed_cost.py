"""lowering/artifact/fixed_cost.py: bytes of parameters in tokens of arithmetic, on one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from npucompile.graphs.types import Aval, Bucket, Leaf, Limits
from npucompile.lowering.artifact.fixed_cost import FLOPS_PER_BYTE, balance, fixed_tokens
from npucompile.lowering.artifact.manifest import GraphEntry, Manifest


def entry(bucket: Bucket, cost: dict[str, int]) -> GraphEntry:
    return GraphEntry(bucket, (), (), None, "", "", None, cost, {}, (), {})


def manifest(cost: dict[str, int], mesh: str = "1", **changes: Any) -> Manifest:
    """Of 1,000 x 800 parameters in bfloat16, whose prefill graph of 64 tokens costs so much."""
    graphs = (
        entry(Bucket("decode", 256, 4), {"flops": 1}),
        entry(Bucket("prefill", 2, 32), cost),
        entry(Bucket("prefill", 1, 4), {"flops": 1}),
    )
    params = (Leaf("w", Aval((1000, 800), torch.bfloat16, ("ffn", None))),)
    whole = Manifest(
        {}, "bf16", mesh, {"ffn": ("tp",)}, "cpu", "eager", Limits(16, 9, 9, 64), params, (), graphs, (), None, None, {}, {}, (), "", ()
    )  # fmt: skip
    return replace(whole, **changes)


def test_two_operations_a_parameter_and_token_are_as_many_tokens_as_operations_a_byte() -> None:
    cost = {"flops": 64 * 2 * 800_000}
    assert (fixed_tokens(manifest(cost), tiles=True), fixed_tokens(manifest(cost), tiles=False)) == (70, 12)
    assert fixed_tokens(manifest(cost)) == (70 if torch.cpu.get_capabilities().get("amx_bf16") else 12)
    # A mixture of experts computes with a tenth of its parameters.
    assert fixed_tokens(manifest({"flops": 64 * 2 * 80_000}), tiles=True) == 700
    # Operations on cached tokens are those of a full context.
    assert fixed_tokens(manifest({"flops": cost["flops"] * 5, "cached_flops": cost["flops"] * 4}), tiles=True) == 70
    # Of two ranks each reads and computes half.
    assert fixed_tokens(manifest({"flops": cost["flops"] // 2}, "tp=2"), tiles=True) == 70
    assert fixed_tokens(manifest({"flops": 10**15})) == 1


@pytest.mark.parametrize(("quantization", "factor"), [("none", 1), ("w4a16", 1), ("w8a8", 2), ("w4a8", 2)])
def test_a_machine_has_its_balance_by_what_it_multiplies(quantization: str, factor: int) -> None:
    on_npu = manifest({}, quantization=quantization, platform={"chip": "ascend910_93", "cann": "9.1", "packages": []})
    assert balance(on_npu) == factor * FLOPS_PER_BYTE["ascend910_93"]
    assert balance(manifest({}, quantization=quantization, dtype="f32")) == factor * 7
