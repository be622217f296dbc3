"""lowering/ascend/operators/attention_rules.py: forms that documents and hardware threads name as legal pass, their neighbours do not."""

from __future__ import annotations

from typing import Any

import pytest

from npucompile.lowering.ascend.operators import attention_rules as rules
from npucompile.lowering.ascend.operators.node import Node
from npucompile.lowering.ascend.operators.tensor_type import TensorType

PACKED = {"equal": [64, 128, 192], "wide": [[192, 192, 128]]}
LENGTHS = {"inputs": ["actual_seq_lengths_kv"], "packed": ["TND"]}


def attention(
    query: tuple[int, ...], cache: tuple[int, ...], *, paged: bool = True, constants: tuple[str, ...] = (), **attributes: Any
) -> Node:
    inputs = {"query": TensorType("bf16", query), "key0": TensorType("bf16", cache), "value0": TensorType("bf16", cache)}
    if paged:
        inputs |= {"block_table": TensorType("i32", (4, 2)), "actual_seq_lengths_kv": TensorType("i64", (4,))}
    return Node("n", "FusedInferAttentionScore", inputs, frozenset(constants), {}, attributes)


@pytest.mark.parametrize(("width", "legal"), [(64, True), (128, True), (192, True), (256, False), (512, False)])
@pytest.mark.parametrize("cache", [(9, 128, 2, -1), (9, 128, -2)])
def test_widths_of_packed_tokens(width, legal, cache):
    """The message of vllm-ascend issue 4020: queryD(256), keyD(256) and valueD(256) must be same equal 192/128/64."""
    shape = tuple(size * -width if size < 0 else size for size in cache)
    told = rules.widths_of_packed_tokens(attention((8, 4, width), shape, num_heads=4, num_key_value_heads=2), {}, **PACKED)
    assert (told is None) == legal, told


def test_lengths_that_the_step_computes():
    sink, host = {rules.SINK: "1"}, {rules.SINK: "0"}
    cache = (9, 128, 512)
    assert rules.lengths_on_the_device(attention((4, 2, 1024), cache, input_layout="BSH"), sink, **LENGTHS) is None
    assert rules.lengths_on_the_device(attention((4, 2, 1024), cache, constants=("actual_seq_lengths_kv",)), host, **LENGTHS) is None
    assert "legal is '1'" in str(rules.lengths_on_the_device(attention((4, 2, 1024), cache), host, **LENGTHS))
    assert "which the device cannot tile" in str(
        rules.lengths_on_the_device(attention((8, 4, 64), cache, input_layout="TND"), sink, **LENGTHS)
    )


def test_paged_caches():
    limits = {"ranks": [3], "least": 128, "most": 512, "multiple": 128}
    assert rules.paged_cache(attention((4, 2, 1024), (9, 128, 512), block_size=128), {}, **limits) is None
    assert rules.paged_cache(attention((4, 2, 4, 256), (4, 2, 2, 256), paged=False), {}, **limits) is None
    assert "block_size is 64" in str(rules.paged_cache(attention((4, 2, 1024), (9, 64, 512), block_size=64), {}, **limits))
    told = rules.paged_cache(attention((4, 2, 1024), (9, 128, 2, 256), block_size=128, input_layout="BSH"), {}, **limits)
    assert told == "key0 is the paged cache bf16[9,128,2,256] in layout BSH; legal is 3 dimensions"


def test_mask_and_head_groups():
    plain = attention((4, 2, 1024), (9, 128, 512), sparse_mode=3, num_heads=16, num_key_value_heads=1)
    assert "atten_mask None; legal is [2048, 2048]" in str(rules.mask(plain, {}, size=2048))
    assert rules.head_groups(plain, {}, most=64) is None
    wide = attention((4, 2, 1024), (9, 128, 512), num_heads=65, num_key_value_heads=1)
    assert "up to 64 query heads a key head" in str(rules.head_groups(wide, {}, most=64))


def latent(queries: int = 4, heads: int = 64, width: int = 512, rotary: int = 64, page: int = 128, **attributes: Any) -> Node:
    node = attention((4, queries, heads * width), (9, page, width), num_heads=heads, num_key_value_heads=1, block_size=page, **attributes)
    node.inputs.update(query_rope=TensorType("bf16", (4, queries, heads * rotary)), key_rope=TensorType("bf16", (9, page, rotary)))
    if queries > 1:
        node.inputs["atten_mask"] = TensorType("bool", (2048, 2048))
    return node


def integers(queries: int = 1, **changes: Any) -> Node:
    attributes = {
        "num_heads": 16,
        "num_key_value_heads": 2,
        "block_size": 128,
        "key_antiquant_mode": 5,
        "value_antiquant_mode": 5,
    } | changes
    node = attention((4, queries, 16 * 128), (9, 128, 256), **attributes)
    node.inputs.update({name: TensorType("i8", (9, 128, 256)) for name in ("key0", "value0")})
    node.inputs.update({f"{name}_antiquant_scale": TensorType("f32", (9, 2, 128)) for name in ("key", "value")})
    return node


def test_pages_of_int8():
    """As the host's tiling of one query a sequence has it: scales in pages, or of channels in the dtype of the query."""
    limits = {"modes": [0, 5], "layouts": ["BSH", "BSND"]}
    channels = integers(key_antiquant_mode=0, value_antiquant_mode=0)
    channels.inputs.update({f"{name}_antiquant_scale": TensorType("bf16", (1, 256)) for name in ("key", "value")})
    for legal in (integers(), channels, attention((4, 2, 1024), (9, 128, 512))):
        assert rules.int8_pages(legal, {}, **limits) is None
    lacking, rotary, swapped = integers(), integers(), integers(key_antiquant_mode=0, value_antiquant_mode=0)
    del lacking.inputs["value_antiquant_scale"]
    rotary.inputs["query_rope"] = TensorType("bf16", (4, 1, 64))
    for wrong, message in [
        (integers(2), "legal is one query of a sequence, in layout BSH or BSND"),
        (integers(input_layout="TND"), "in layout TND; legal is one query"),
        (rotary, "with query_rope; legal is"),
        (integers(value_antiquant_mode=0), "key_antiquant_mode is 5 and value_antiquant_mode 0; legal are 0, 5, the same for both"),
        (integers(key_antiquant_mode=1, value_antiquant_mode=1), "key_antiquant_mode is 1"),
        (lacking, "without value_antiquant_scale"),
        (swapped, "key_antiquant_scale is f32[9,2,128] in mode 0; legal is bf16[1,256]"),
    ]:
        assert message in str(rules.int8_pages(wrong, {}, **limits))
    assert rules.int8_widths(integers(), {}, multiple=32) is None
    assert "heads are 128 wide" in str(rules.int8_widths(integers(), {}, multiple=96))


def test_latent_keys():
    """As the host's tiling has it for BSH: widths 512 and 64, a power of two heads, sixteen queries, pages of 16 or 128."""
    limits = {"width": 512, "rotated": 64, "heads": 128, "queries": 16, "pages": [16, 128]}
    plain = attention((4, 2, 1024), (9, 128, 512), num_heads=16, num_key_value_heads=1)
    for legal in (plain, latent(), latent(1, 128), latent(16, page=16), latent(17, sparse_mode=4)):
        assert rules.latent_keys(legal, {}, **limits) is None
    assert rules.head_groups(latent(heads=128), {}, most=64) is None
    for wrong, message in [
        (latent(17), "17 queries a sequence; legal are up to 16"),
        (latent(heads=48), "48 query heads read 1 key heads over pages of 128; legal are a power of two up to 128"),
        (latent(heads=256), "up to 128"),
        (latent(page=64), "pages of 16 or 128"),
        (latent(width=256), "keys are 256 and 64 wide; legal are latents of 512 beside rotary parts of 64"),
    ]:
        assert message in str(rules.latent_keys(wrong, {}, **limits))
    lacking, unmasked = latent(), latent()
    del lacking.inputs["key_rope"], unmasked.inputs["atten_mask"]
    assert "lacks key_rope" in str(rules.latent_keys(lacking, {}, **limits))
    assert "a mask is absent" in str(rules.latent_keys(unmasked, {}, **limits))
