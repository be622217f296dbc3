"""models/variant.py: a variant decides how parameters are stored, and the published schemes have names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import fleets

from npucompile.graphs import tree
from npucompile.graphs.errors import ConfigError
from npucompile.models.variant import PLAIN, Variant, fewer_bytes_in_parts, with_fused_experts, with_packages

F32 = torch.float32


SAVED = (Variant(kv_repeat=2), Variant(kv_repeat=4), Variant(grouped=True), Variant(kv_repeat=2, split_at_once=True))


@pytest.mark.parametrize("variant", SAVED, ids=str)
def test_parameters_of_a_variant_can_be_saved_again(variant: Variant) -> None:
    """Repeated heads and transposed matrices split into the checkpoint's own tensors."""
    tensors = fleets.tensors()
    for path, param in tree.flatten(fleets.model(variant).params(F32)):
        parts = [tensors[name] for name in param.source.names]
        joined = param.source.join(*parts)
        assert (tuple(joined.shape), joined.dtype) == (param.aval.shape, param.aval.dtype), path
        assert all(torch.equal(a, b) for a, b in zip(param.source.split(joined), parts, strict=True)), path


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_declared_shapes_are_what_quantising_makes(scheme: str) -> None:
    model = fleets.model(fleets.quantised(scheme))
    for (path, param), (_, tensor) in zip(tree.flatten(model.params(F32)), tree.flatten(fleets.weights(model)), strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (param.aval.shape, param.aval.dtype), path


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_repeated_heads_change_no_logits(copies: int) -> None:
    """Parameters and pools have each key-value head `copies` times; logits differ by rounding at most."""
    serving = fleets.Serving(2, 0, [2])
    plain, repeated = fleets.OneDevice(fleets.model()), fleets.OneDevice(fleets.model(Variant(kv_repeat=copies)))
    for bucket, (inputs,) in serving.steps(2):
        want, doubled = plain.step(bucket, inputs), repeated.step(bucket, inputs)
        assert (want["logits"] - doubled["logits"]).abs().max() < 5e-5
        serving.commit(bucket, [inputs], [want])
    keys, many = (device.state["layers"][1]["k"] for device in (plain, repeated))
    assert many.shape[2] == copies * keys.shape[2]
    assert (many - keys.repeat_interleave(copies, 2)).abs().max() < 1e-5


@pytest.mark.parametrize("copies", [1, 2])
def test_projections_that_are_split_at_once_change_no_logits(copies: int) -> None:
    serving = fleets.Serving(2, 0, [2])
    plain, split = (fleets.OneDevice(fleets.model(variant)) for variant in (PLAIN, Variant(kv_repeat=copies, split_at_once=True)))
    for bucket, (inputs,) in serving.steps(2):
        want, got = plain.step(bucket, inputs), split.step(bucket, inputs)
        assert (want["logits"] - got["logits"]).abs().max() < 5e-5
        serving.commit(bucket, [inputs], [want])


def test_more_copies_than_query_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads must be a multiple of 16 key-value heads, copies included"):
        replace(fleets.config(), variant=Variant(kv_repeat=8))


def test_parts_move_fewer_bytes_where_devices_are_more_than_the_rows_of_a_token():
    """Ten rows of int8 there and of bfloat16 back are 30 bytes a channel; all tokens to n devices and their sums back are 4n."""
    assert [fewer_bytes_in_parts(True, 10, devices) for devices in (4, 7, 8, 16)] == [False, False, True, True]
    assert [fewer_bytes_in_parts(False, 10, devices) for devices in (8, 10, 11, 16)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("backend", "packages", "taken"),
    [("aclgraph", ("sgl-kernel-npu", "vllm-ascend"), True), ("aclgraph", ("sgl-kernel-npu",), False), ("ge", ("vllm-ascend",), False)],
)
def test_operators_of_packages_decide_how_a_gated_deltanet_layer_is_kept(backend, packages, taken):
    variant = with_packages(PLAIN, backend, packages)
    assert (variant.one_window, variant.split_at_once) == (taken, taken)


@pytest.mark.parametrize(
    ("backend", "chip", "packages", "quantization", "F", "fused"),
    [
        ("aclgraph", "ascend910_93", ("sgl-kernel-npu", "vllm-ascend"), "w4a8", 1024, True),
        ("aclgraph", "ascend910_93", ("sgl-kernel-npu",), "w4a8", 1024, False),
        ("aclgraph", "ascend910b", ("vllm-ascend",), "w4a8", 1024, False),
        ("ge", "ascend910_93", ("vllm-ascend",), "w4a8", 1024, False),
        ("aclgraph", "ascend910_93", ("vllm-ascend",), "w8a8", 1024, False),
        ("aclgraph", "ascend910_93", ("vllm-ascend",), "w4a8", 4096, False),
    ],
)
def test_experts_are_fused_where_the_platform_has_a_kernel_for_them(backend, chip, packages, quantization, F, fused):
    variant = with_fused_experts(fleets.quantised(quantization), backend, chip, packages, (4096, F), 16)
    assert variant.fused_experts == fused


def test_experts_of_few_tokens_or_of_a_short_part_are_not_fused():
    variant = replace(fleets.quantised("w4a8"), fused_experts=True, most_dispatched=64)
    assert [variant.fuses(tokens) for tokens in (1, 23, 24, 64, 65)] == [False, False, True, True, False]
    parts = replace(variant, dispatches_in_parts=True)
    assert [parts.fuses(tokens) for tokens in (64, 65, 88, 128)] == [True, False, True, True]
    assert not replace(parts, most_dispatched=0).fuses(64)
