"""Checks of matrix products: sizes, groups of weights, and lists of tokens of each expert."""

from __future__ import annotations

from collections.abc import Mapping

from .node import Node

_FLOATS = ("bf16", "f16")


def groups_of_weights(node: Node, options: Mapping[str, str], inner: int, outer: int, weights: list[str], dtypes: list[str]) -> str | None:
    """Sizes of a grouped product: the activations' last axis is shorter than `inner`, and the weights have at most `outer` columns.

    Args:
        dtypes: those of weights that the limits are for.
    """
    for name, weight in node.inputs.items():
        if name.rstrip("0123456789") not in weights or weight.dtype not in dtypes:
            continue
        x = node.inputs.get("x") or node.inputs["x0"]
        if x.shape[-1] >= inner:
            return f"takes x of {x.shape[-1]} columns with weights in {weight.dtype}; legal are fewer than {inner}"
        if weight.shape[-1] > outer:
            return f"{name} is {weight}, with {weight.shape[-1]} columns; legal are up to {outer}"
    return None


def int4_beside_floats(node: Node, options: Mapping[str, str]) -> str | None:
    """A grouped product of floats and int4 weights [E, K, N] has scales and offsets alike, [E, N] or [E, groups, N], and N is even."""
    x, weight = node.inputs.get("x0"), node.inputs.get("weight0")
    if x is None or weight is None or x.dtype not in _FLOATS or weight.dtype != "i4":
        return None
    (experts, inner, outer), given = weight.shape, {name: node.inputs.get(f"antiquant_{name}0") for name in ("scale", "offset")}
    for name, tensor in given.items():
        shape = () if tensor is None else tensor.shape
        groups = shape[1] if len(shape) == 3 else 1
        if shape not in ((experts, outer), (experts, groups, outer)) or not groups or inner % groups:
            return (
                f"antiquant_{name} is {tensor or 'absent'} beside weights {weight}; legal is [{experts}, {outer}], or "
                f"[{experts}, groups, {outer}] with a number of groups that divides {inner}"
            )
    scale, offset = given.values()
    if scale is not None and offset is not None and scale.shape != offset.shape:
        return f"antiquant_scale is {scale} and antiquant_offset {offset}; legal is one shape"
    return f"weight is {weight} of {outer} columns; legal is an even number of int4" if outer % 2 else None


def as_many_tensors(node: Node, options: Mapping[str, str], inputs: list[str], like: str) -> str | None:
    """Lists of tensors are as long as another list, or empty; a tensor without elements stands for an absent one."""
    wanted = _listed(node, like)
    for name in inputs:
        if (count := _listed(node, name)) not in (0, wanted):
            return f"has {count} tensors of {name} for {wanted} of {like}; legal are {wanted}, or none"
    return None


def one_number_an_expert(node: Node, options: Mapping[str, str], inputs: list[str], weights: str) -> str | None:
    """A list of tokens has a number for each expert: those of the first axis of one weight, or one for each of several weights."""
    count, first = _listed(node, weights), node.inputs.get(f"{weights}0")
    if first is None:
        return None
    experts = first.shape[0] if count == 1 and len(first.shape) > 2 else count
    for name in inputs:
        if name in node.inputs and node.inputs[name].shape[0] != experts:
            return f"{name} is {node.inputs[name]} for {experts} experts; legal is one number for each"
    return None


def int4_groups(node: Node, options: Mapping[str, str], least: int, multiple: int) -> str | None:
    """int4 weights of an output channel that share a scale: all of them (0), or groups of fewer."""
    size, inner = node.attributes.get("antiquant_group_size", 0), node.inputs["x"].shape[-1]
    if size == 0 or (least <= size < inner and size % multiple == 0):
        return None
    limits = f"{least} to {inner - 1}, a multiple of {multiple}"
    return f"antiquant_group_size is {size} for a contraction of {inner}; legal are 0 and {limits}"


def transposed_product(node: Node, options: Mapping[str, str], below: int) -> str | None:
    """Sizes of a batched product that transposes its first factor: the batch and the summed size, and with the batch second also what
    they are multiplied."""
    shape, order = node.inputs["x1"].shape, tuple(node.attributes.get("perm_x1", (0, 1, 2)))
    batch, summed = shape[order[0]], shape[order[2]]
    if order[0] and batch * summed >= below:
        return f"x1 is {node.inputs['x1']} with the batch second: batch times summed size is {batch * summed}; legal is below {below}"
    if max(batch, summed) >= below:
        return f"x1 is {node.inputs['x1']}, a batch of {batch} and a summed size of {summed}; legal is below {below}"
    return None


def _listed(node: Node, name: str) -> int:
    """Length of a list of tensors (`weight0`, `weight1`, ...), without tensors that have no elements."""
    return sum(key.rstrip("0123456789") == name and key != name and tensor.elements > 0 for key, tensor in node.inputs.items())
