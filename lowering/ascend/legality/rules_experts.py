"""Rules of expert dispatch and combine, and of grouped matrix products."""

from __future__ import annotations

from collections.abc import Mapping

from ....graphs.types import DISPATCH, FUSED_EXPERTS
from ..ge_file import GROUPS
from .node import Node

_FLOATS = ("bf16", "f16")


def experts_of_a_rank(node: Node, options: Mapping[str, str], most: int) -> str | None:
    """Experts divide among the ranks that have some, and experts of a rank times ranks are at most `most`."""
    ranks, experts = node.attributes.get("ep_world_size", 0), node.attributes.get("moe_expert_num", 0)
    ranks -= node.attributes.get("shared_expert_rank_num", 0)
    if ranks <= 0 or experts % ranks:
        return f"divides {experts} experts among {ranks} ranks; legal is a multiple of the ranks"
    if (slots := experts // ranks * node.attributes["ep_world_size"]) > most:
        return f"has {experts // ranks} experts on each of {ranks} ranks, {slots} in all; legal are up to {most}"
    return None


def communicator(node: Node, options: Mapping[str, str], attribute: str, exchange: bool) -> str | None:
    """Expert dispatch and combine have a communicator that no other operator of any graph uses.

    A graph names communicators by the symbols `GROUPS`. As every graph keeps one of them for the exchange, no two graphs can disagree.

    Args:
        attribute: which names the communicator.
        exchange: whether the operator is dispatch or combine.
    """
    group = node.attributes.get(attribute)
    if group not in GROUPS:
        return f"communicates over {group!r}; legal are the symbols {', '.join(GROUPS)}"
    if exchange and group != DISPATCH:
        return f"shares the communicator {group!r} with other collectives; legal is {DISPATCH!r}, which is for dispatch and combine alone"
    if not exchange and group in (DISPATCH, FUSED_EXPERTS):
        return f"uses the communicator {group!r}, which is for expert dispatch and combine alone; legal are tp, dp and world"
    return None


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
