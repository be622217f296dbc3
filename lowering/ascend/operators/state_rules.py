"""Checks of the recurrent delta rule and of convolutions that continue, from the interface documentation that the facts name."""

from __future__ import annotations

from collections.abc import Mapping

from .node import Node


def delta_rule_sizes(node: Node, options: Mapping[str, str], heads: int, width: int, tokens: int) -> str | None:
    """Sizes of the recurrent delta rule.

    Args:
        heads: most key heads, and most value heads.
        width: widest head.
        tokens: most tokens of one sequence in a step.
    """
    shapes = {name: tensor.shape for name, tensor in node.inputs.items()}
    if any(len(shapes[name]) != 3 for name in ("query", "key", "value")) or len(shapes["state"]) != 4:
        return f"takes {node.describe()}; legal are query, key and value of three dimensions, and a state of four"
    if wrong := _heads(node, heads, width):
        return wrong
    (total, _, key_width), (_, value_heads, value_width) = shapes["key"], shapes["value"]
    if shapes["state"][1:] != (value_heads, value_width, key_width):
        state, sizes = node.inputs["state"], f"{value_heads},{value_width},{key_width}"
        return f"state is {state}; legal is [slots,{sizes}]: value heads, value width, key width"
    sequences = shapes["actual_seq_lengths"][0]
    if total > tokens * sequences:
        return f"takes {total} tokens of {sequences} sequences; legal are up to {tokens} tokens a sequence"
    return None


def chunked_delta_rule_sizes(node: Node, options: Mapping[str, str], heads: int, width: int) -> str | None:
    """Sizes of the chunked delta rule.

    Args:
        heads: most key heads, and most value heads.
        width: widest head.
    """
    shapes = {name: tensor.shape for name, tensor in node.inputs.items()}
    if any(len(shapes[name]) != 3 for name in ("query", "key", "value")):
        return f"takes {node.describe()}; legal are query, key and value of three dimensions"
    if wrong := _heads(node, heads, width):
        return wrong
    (_, _, key_width), (_, value_heads, value_width) = shapes["key"], shapes["value"]
    sequences = shapes["actual_seq_lengths"][0]
    if shapes["initial_state"] != (sequences, value_heads, value_width, key_width):
        sizes = f"{sequences},{value_heads},{value_width},{key_width}"
        return f"initial_state is {node.inputs['initial_state']}; legal is [{sizes}]: sequences, value heads, value width, key width"
    return None


def convolution_states(node: Node, options: Mapping[str, str]) -> str | None:
    """A convolution that continues after accepted tokens: a state of a slot holds the inputs before its tokens, and one for each but
    the first."""
    x, weight, state = (node.inputs[name] for name in ("x", "weight", "conv_state"))
    if (len(x.shape), len(weight.shape), len(state.shape)) != (3, 2, 3) or not x.shape[-1] == weight.shape[-1] == state.shape[-1]:
        return f"takes {node.describe()}; legal are x [sequences,tokens,channels], weight [width,channels], states [slots,inputs,channels]"
    sequences, tokens, _ = x.shape
    least = weight.shape[0] - 1 + tokens - 1
    if state.shape[1] < least:
        return f"conv_state is {state} for {tokens} tokens of a sequence; legal are at least {least} inputs a slot"
    for name in ("cache_indices", "num_accepted_tokens"):
        if node.inputs[name].shape != (sequences,):
            return f"{name} is {node.inputs[name]} for {sequences} sequences; legal is one number for each"
    return None


def _heads(node: Node, heads: int, width: int) -> str | None:
    """Number and widths of the heads of keys and values."""
    (_, keys, key_width), (_, values, value_width) = node.inputs["key"].shape, node.inputs["value"].shape
    if max(keys, values) <= heads and max(key_width, value_width) <= width and values % keys == 0:
        return None
    return (
        f"has {keys} key and {values} value heads of widths {key_width} and {value_width}; legal are up to {heads} heads, a"
        f" multiple of the key heads as value heads, and widths up to {width}"
    )
