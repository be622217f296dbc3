"""Checks that operators of many kinds have in common; facts name them and give their limits. Others stand beside the operator's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ge_file import LEGAL_GROUPS, is_symbol
from .node import LegalityRule, Node
from .table import COMMUNICATING, record_of
from .tensor_type import NZ, TensorType

_OWN_GROUPS = frozenset(record.own_group for record in COMMUNICATING.values() if record.own_group)


def attribute_values(node: Node, options: Mapping[str, str], attribute: str, legal: list[Any], default: Any = None) -> str | None:
    """An attribute has one of some values; `default` is that of an operator which does not name it."""
    value = node.attributes.get(attribute, default)
    return None if value in legal else f"{attribute} is {value!r}; legal are {', '.join(map(repr, legal))}"


def attribute_range(node: Node, options: Mapping[str, str], attribute: str, least: int, most: int, multiple: int = 1) -> str | None:
    """A number among the attributes lies in a range."""
    value = node.attributes.get(attribute)
    if isinstance(value, int) and least <= value <= most and value % multiple == 0:
        return None
    return f"{attribute} is {value}; legal is {_range(least, most, multiple)}"


def no_attribute(node: Node, options: Mapping[str, str], attribute: str) -> str | None:
    """A release of CANN does not know an attribute that later ones have."""
    return f"has the attribute {attribute}; legal is an operator without it" if attribute in node.attributes else None


def no_inputs(node: Node, options: Mapping[str, str], inputs: list[str]) -> str | None:
    """Optional inputs that have to be absent."""
    given = [name for name in inputs if name in node.inputs]
    return f"takes {', '.join(given)}; legal is to leave them out" if given else None


def dimension(
    node: Node, options: Mapping[str, str], inputs: list[str], axis: int, least: int, most: int, meaning: str, multiple: int = 1
) -> str | None:
    """One size of each of some inputs lies in a range; inputs that are absent, or shorter, are passed over."""
    for name, tensor in listed(node, inputs):
        if len(tensor.shape) > (axis if axis >= 0 else -axis - 1):
            size = tensor.shape[axis]
            if not least <= size <= most or size % multiple:
                return f"{name} is {tensor}: {meaning} is {size}; legal is {_range(least, most, multiple)}"
    return None


def power_of_two(node: Node, options: Mapping[str, str], inputs: list[str], axis: int, most: int, meaning: str) -> str | None:
    """One size of each of some inputs is a power of two."""
    for name, tensor in listed(node, inputs):
        size = tensor.shape[axis]
        if size & (size - 1) or size > most:
            return f"{name} is {tensor}: {meaning} is {size}; legal is a power of two up to {most}"
    return None


def rank(node: Node, options: Mapping[str, str], inputs: list[str], legal: list[int]) -> str | None:
    """Inputs have one of some numbers of dimensions."""
    for name, tensor in listed(node, inputs):
        if len(tensor.shape) not in legal:
            return f"{name} is {tensor}, of {len(tensor.shape)} dimensions; legal are {', '.join(map(str, legal))}"
    return None


def known_at_build(node: Node, options: Mapping[str, str], inputs: list[str]) -> str | None:
    """Inputs that shapes of results follow from are constants: otherwise the graph has dynamic shapes, and the host schedules it."""
    for name, tensor in listed(node, inputs):
        if name not in node.constants:
            return f"{name} ({tensor}) is computed in the step, and the shape of a result depends on it; legal is a constant"
    return None


def filled_tiles(node: Node, options: Mapping[str, str], inputs: list[str], rows: int, widths: Mapping[str, int]) -> str | None:
    """An input in NZ divides into whole tiles; `widths` are columns of a tile by dtype."""
    for name, tensor in listed(node, inputs):
        if tensor.format == NZ:
            width = widths.get(tensor.dtype)
            if width is None or len(tensor.shape) < 2 or tensor.shape[-2] % rows or tensor.shape[-1] % width:
                sizes = f"{rows} rows of {width} {tensor.dtype}" if width else f"dtypes {', '.join(widths)}"
                return f"{name} is {tensor}, which does not divide into tiles; legal are multiples of {sizes}, or ND"
    return None


def side_by_side(node: Node, options: Mapping[str, str], inputs: list[str]) -> str | None:
    """Inputs lie in row-major order without gaps: the kernel takes no strides, or writes a copy instead of the input."""
    strided = [name for name in inputs if name in node.strided]
    return f"{' and '.join(strided)} of {node.describe()} do not lie side by side; legal is a contiguous tensor" if strided else None


def no_empty_input(node: Node, options: Mapping[str, str]) -> str | None:
    """GE refuses these operators when an input has an unknown or empty dimension."""
    for name, tensor in node.inputs.items():
        if any(size <= 0 for size in tensor.shape):
            return f"{name} is {tensor}; legal are dimensions above zero"
    return None


def communicator(node: Node, options: Mapping[str, str], attribute: str) -> str | None:
    """Operators with a group of their own share its communicator with no other operator of any graph.

    A graph names communicators by symbols. As every graph keeps some of them for these, no two graphs can disagree.

    Args:
        attribute: which names the communicator.
    """
    group, own = node.attributes.get(attribute), COMMUNICATING[node.type].own_group
    if not is_symbol(group):
        return f"communicates over {group!r}; legal are the symbols {LEGAL_GROUPS}"
    if own and group != own:
        return f"shares the communicator {group!r} with other collectives; legal is {own!r}, which is for dispatch and combine alone"
    if not own and group in _OWN_GROUPS:
        return f"uses the communicator {group!r}, which is for expert dispatch and combine alone; legal are tp, dp and world"
    return None


def listed(node: Node, names: list[str]) -> list[tuple[str, TensorType]]:
    """Inputs of some names, those of lists with all their elements ("weight" means weight0, weight1, ...)."""
    return [(name, tensor) for name, tensor in node.inputs.items() if name in names or name.rstrip("0123456789") in names]


def _range(least: int, most: int, multiple: int) -> str:
    return f"{least} to {most}" + (f", a multiple of {multiple}" if multiple > 1 else "")


RULES: Mapping[str, LegalityRule] = {
    rule.__name__: rule
    for rule in (
        *(attribute_values, attribute_range, no_attribute, no_inputs, dimension, power_of_two, rank, known_at_build, filled_tiles),
        *(side_by_side, no_empty_input, communicator),
    )
}
"""Rules by the names that facts give them."""


def rule_of(node: Node, name: str) -> LegalityRule:
    """The rule that a fact names: of the operator's own record, or one of `RULES`."""
    record = record_of(node)
    own = record.rules if record is not None else ()
    return next((rule for rule in own if rule.__name__ == name), None) or RULES[name]
