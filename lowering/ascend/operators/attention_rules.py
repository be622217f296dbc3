"""Checks of attention, from the host's tiling code and the interface documentation that the facts name."""

from __future__ import annotations

from collections.abc import Mapping

from .node import Node
from .tensor_type import TensorType

SINK = "ge.tiling_schedule_optimize"
"""GE's option that lets the device compute an operator's tiling: "1" where it does."""

_BAND = 4
"""`sparse_mode` of a sliding window."""


def widths_of_packed_tokens(node: Node, options: Mapping[str, str], equal: list[int], wide: list[list[int]]) -> str | None:
    """Head widths of a packed layout (TND): query, key and value have one of the widths `equal`, or one of the combinations `wide`.

    A paged cache has its heads and their widths in one axis, or in two; the number of heads is an attribute.
    """
    query, key, value = node.inputs["query"].shape[-1], _width(node, "key0"), _width(node, "value0")
    if [query, key, value] in wide or (query == key == value and query in equal):
        return None
    combinations = "; ".join("/".join(map(str, widths)) for widths in wide)
    return (
        f"heads of query, key and value are {query}, {key} and {value} wide in layout {node.attributes.get('input_layout')};"
        f" legal are {', '.join(map(str, equal))} for all three, or {combinations}; BSND and BSH take up to 512"
    )


def lengths_on_the_device(node: Node, options: Mapping[str, str], inputs: list[str], packed: list[str]) -> str | None:
    """Lengths that the step computes need tiling on the device, which packed layouts do not have."""
    given = [name for name in inputs if name in node.inputs and name not in node.constants]
    if not given:
        return None
    layout = node.attributes.get("input_layout", "BSH")
    if options.get(SINK) != "1":
        return (
            f"{' and '.join(given)} are computed in the step and {SINK} is {options.get(SINK)!r}: the host would read them and schedule"
            " every step; legal is '1'"
        )
    if layout in packed:
        return f"{' and '.join(given)} are computed in the step in layout {layout}, which the device cannot tile; legal are BSND and BSH"
    return None


def paged_cache(node: Node, options: Mapping[str, str], ranks: list[int], least: int, most: int, multiple: int) -> str | None:
    """The form of a paged cache: dimensions of its tensors, and tokens of a page."""
    if "block_table" not in node.inputs:
        return None
    page = node.attributes.get("block_size", 0)
    if not least <= page <= most or page % multiple:
        return f"block_size is {page}; legal is {least} to {most}, a multiple of {multiple}"
    for name in ("key0", "value0"):
        cache = node.inputs[name]
        if len(cache.shape) not in ranks:
            legal = ", ".join(f"{dimensions} dimensions" for dimensions in ranks)
            return f"{name} is the paged cache {cache} in layout {node.attributes.get('input_layout')}; legal is {legal}"
    if "actual_seq_lengths_kv" not in node.inputs:
        return "a paged cache is read without actual_seq_lengths_kv; legal is to give the lengths"
    return None


def mask(node: Node, options: Mapping[str, str], size: int) -> str | None:
    """The compressed causal mask of the sparse modes 2, 3 and 4."""
    given = node.inputs.get("atten_mask")
    if given is None or given.shape[-2:] != (size, size):
        return f"sparse_mode is {node.attributes.get('sparse_mode', 0)} and atten_mask {given}; legal is [{size}, {size}]"
    return None


def head_groups(node: Node, options: Mapping[str, str], most: int) -> str | None:
    """Query heads are a multiple of the key's, and at most `most` times as many; latent keys have a rule of their own."""
    if "query_rope" in node.inputs:
        return None
    queries = node.attributes.get("num_heads", 1)
    keys = node.attributes.get("num_key_value_heads", 0) or queries
    if queries % keys or queries // keys > most:
        return f"{queries} query heads share {keys} key heads; legal is a multiple, up to {most} query heads a key head"
    return None


def latent_keys(node: Node, options: Mapping[str, str], width: int, rotated: int, heads: int, queries: int, pages: list[int]) -> str | None:
    """Sizes of attention over paged latents with a rotary part beside them.

    Args:
        width, rotated: of a head's latent and of its rotary part.
        heads: most query heads, a power of two.
        queries: most queries of a sequence in layouts that are not packed.
        pages: legal numbers of tokens of a page.
    """
    if "query_rope" not in node.inputs and "key_rope" not in node.inputs:
        return None
    if absent := {"query_rope", "key_rope", "block_table"} - node.inputs.keys():
        return f"lacks {', '.join(sorted(absent))}; legal is to give the rotary parts of queries and keys, over pages"
    count, keys, page = (
        node.attributes.get("num_heads", 1),
        node.attributes.get("num_key_value_heads", 0),
        node.attributes.get("block_size", 0),
    )
    if keys != 1 or count & (count - 1) or count > heads or page not in pages:
        return (
            f"{count} query heads read {keys} key heads over pages of {page}; legal are a power of two up to {heads}, one, and pages of "
            f"{' or '.join(map(str, pages))}"
        )
    latent, rotary = node.inputs["key0"].shape[-1], node.inputs["key_rope"].shape[-1]
    if (latent, rotary) != (width, rotated):
        return f"keys are {latent} and {rotary} wide; legal are latents of {width} beside rotary parts of {rotated}"
    layout, query = node.attributes.get("input_layout", "BSH"), node.inputs["query"]
    if layout in ("BSH", "BSND") and query.shape[1] > queries and node.attributes.get("sparse_mode", 0) != _BAND:
        return f"query is {query} in layout {layout}: {query.shape[1]} queries a sequence; legal are up to {queries}"
    masked = "atten_mask" in node.inputs
    if layout in ("BSH", "BSND") and masked != (query.shape[1] > 1):
        return f"query is {query} and a mask is {'given' if masked else 'absent'}; legal is one where a sequence has several queries"
    return None


def int8_pages(node: Node, options: Mapping[str, str], modes: list[int], layouts: list[str]) -> str | None:
    """Keys and values of int8 over a page table, in row-major pages: one query of a sequence, with scales of both.

    Args:
        modes: legal `key_antiquant_mode`, equal for values.
        layouts: legal `input_layout`.
    """
    key, query = node.inputs["key0"], node.inputs["query"]
    if key.dtype != "i8" or "block_table" not in node.inputs:
        return None
    layout, heads = node.attributes.get("input_layout", "BSH"), node.attributes.get("num_key_value_heads", 0)
    if "query_rope" in node.inputs or layout not in layouts or query.shape[1] != 1:
        rope = " with query_rope" if "query_rope" in node.inputs else ""
        return (
            f"keys are {key} over a block_table, query {query} in layout {layout}{rope}; legal is one query of a sequence, in layout "
            f"{' or '.join(layouts)}, without query_rope"
        )
    mode = node.attributes.get("key_antiquant_mode", 0)
    if mode not in modes or node.attributes.get("value_antiquant_mode", 0) != mode:
        return (
            f"key_antiquant_mode is {mode} and value_antiquant_mode {node.attributes.get('value_antiquant_mode', 0)}; legal are"
            f" {', '.join(map(str, modes))}, the same for both"
        )
    if absent := {"key_antiquant_scale", "value_antiquant_scale"} - node.inputs.keys():
        return f"keys are {key} without {' and '.join(sorted(absent))}; legal is to give both"
    width, page = _width(node, "key0"), node.attributes.get("block_size", 0)
    heads = heads or node.attributes.get("num_heads", 1)
    legal = TensorType(query.dtype, (1, heads * width)) if mode == 0 else TensorType("f32", (key.shape[0], heads, page))
    for name in ("key_antiquant_scale", "value_antiquant_scale"):
        if (node.inputs[name].dtype, node.inputs[name].shape) != (legal.dtype, legal.shape):
            return f"{name} is {node.inputs[name]} in mode {mode}; legal is {legal}"
    return None


def int8_widths(node: Node, options: Mapping[str, str], multiple: int) -> str | None:
    """Heads whose keys and values are int8 over a page table fill whole blocks of 32 bytes."""
    if node.inputs["key0"].dtype != "i8" or "block_table" not in node.inputs or not _width(node, "key0") % multiple:
        return None
    return f"heads are {_width(node, 'key0')} wide and their keys {node.inputs['key0']}; legal for int8 is a multiple of {multiple}"


def no_mask_over_pages(node: Node, options: Mapping[str, str]) -> str | None:
    """A mask that is not the compressed causal one is ignored beyond 512 keys of a paged cache; lengths do the same."""
    mask = node.inputs.get("atten_mask")
    if mask is None or "block_table" not in node.inputs:
        return None
    mode = node.attributes.get("sparse_mode", 0)
    return f"sparse_mode is {mode}, with the mask {mask} over pages; legal are lengths without a mask, or modes 2, 3 and 4"


def mask_or_pages(node: Node, options: Mapping[str, str]) -> str | None:
    """Attention over packed tokens with neither averages all values."""
    if "atten_mask" in node.inputs or "block_table" in node.inputs:
        return None
    return f"has neither a mask nor pages in layout {node.attributes.get('input_layout')}; legal is a mask with sparse_mode 3, or pages"


def _width(node: Node, name: str) -> int:
    """Width of a cache's heads; a paged cache of three dimensions has all heads in the last."""
    shape = node.inputs[name].shape
    if "block_table" in node.inputs and len(shape) == 3:
        heads: int = node.attributes.get("num_key_value_heads", 0) or node.attributes.get("num_heads", 1)
        return shape[-1] // heads
    return shape[-1]
