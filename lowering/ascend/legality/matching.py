"""Matches an operator's inputs, attributes and types with the forms and columns of the table."""

from __future__ import annotations

from collections.abc import Iterator

from ..operators.node import Node
from ..operators.tensor_type import NZ, TensorType
from .nodes import PRIVATE
from .table import DTYPES, FOLDED, FORM, PLACE, TYPES, Column, Fact

_KINDS = {"Int": (int,), "Float": (float, int), "Bool": (bool, int), "String": (str,), "Type": (int,)}
"""Python types of an attribute's value by its type in REG_OP; lists are tuples."""
_COLUMNS_SHOWN = 12

Finding = tuple[str, str]
"""What is wrong and what is legal, and the source."""


def form_of(node: Node, rows: tuple[Fact, ...]) -> Iterator[Finding]:
    """Inputs and outputs that the operator does not have, and required ones that are absent."""
    forms = [row for row in rows if row.what == FORM]
    if not forms:
        yield "the table has no form of it; legal is a row of kind form", PLACE
        return
    form = forms[-1]
    names = {base_of(name, form) for name in node.inputs}
    if unknown := sorted(names - form.inputs.keys()):
        yield f"has inputs {', '.join(unknown)}; legal are {', '.join(form.inputs)}", form.source
    if absent := [name for name, kind in form.inputs.items() if kind == "required" and name not in names]:
        yield f"lacks {', '.join(absent)}; legal is an operator with {', '.join(form.inputs)}", form.source


def attributes_of(node: Node, rows: tuple[Fact, ...]) -> Iterator[Finding]:
    """Attributes that the operator does not have, or of another type than it has them."""
    form = next((row for row in reversed(rows) if row.what == FORM), None)
    if form is None:
        return
    # A list's length is an attribute of the message and none of the definition.
    known = form.attributes.keys() | ({"N", "num_split"} if "dynamic" in {*form.inputs.values(), *form.outputs.values()} else set())
    if node.unnamed:
        yield f"is given {', '.join(sorted(node.unnamed))}; legal is to leave out what the table has no name for", PLACE
    if unknown := sorted(node.attributes.keys() - known):
        yield f"has attributes {', '.join(unknown)}; legal are {', '.join(sorted(known)) or 'none'}", form.source
    if private := sorted(node.private):
        yield f"has attributes {', '.join(private)}; legal are {', '.join(sorted(PRIVATE))}", "torchair of torch_npu 2.13.0"
    for name, value in node.attributes.items():
        kinds = (tuple,) if form.attributes.get(name, "").startswith("List") else _KINDS.get(form.attributes.get(name, ""))
        if kinds is not None and not isinstance(value, kinds):
            yield f"{name} is {value!r}; legal is a value of type {form.attributes[name]}", form.source


def types_of(node: Node, rows: tuple[Fact, ...]) -> Iterator[Finding]:
    """Dtypes and formats that no column of the operator's definition has."""
    form = next((row for row in reversed(rows) if row.what == FORM), None)
    if form is None or fitting(node, rows) is not None:
        return
    typed = [row for row in rows if row.what in (TYPES, DTYPES)]
    if not typed:
        yield "the table has no dtypes of it; legal is a row of kind types", PLACE
        return
    given = _given(node, form)
    names = list(dict.fromkeys(name for name, _ in given))
    told = ", ".join(f"{name}={entry_of(tensor)}" for name, tensor in given)
    sources = "; ".join(dict.fromkeys(row.source or row.assumed for row in typed))
    if all(row.what == DTYPES for row in typed):
        lists = {name: " ".join(sorted(dtypes)) for row in typed for name, dtypes in row.dtypes.items() if name in names}
        yield f"has {told}; legal are {', '.join(f'{name} of {dtypes}' for name, dtypes in lists.items())}", sources
        return
    legal = dict.fromkeys(tuple(column.get(name, "-") for name in names) for row in typed for column in row.columns)
    shown = " | ".join("/".join(entries) for entries in list(legal)[:_COLUMNS_SHOWN])
    more = f", and {len(legal) - _COLUMNS_SHOWN} more" if len(legal) > _COLUMNS_SHOWN else ""
    yield f"has {told}; legal {'/'.join(names)} are {shown}{more}", sources


def fitting(node: Node, rows: tuple[Fact, ...]) -> Fact | None:
    """The row that allows an operator's types: of the release before those that are assumed; or the one by which GE computes it."""
    form = next((row for row in reversed(rows) if row.what == FORM), None)
    if form is None:
        return None
    if node.constants == node.inputs.keys():
        for row in rows:
            if row.what == FOLDED:
                return row
    given = _given(node, form)
    fits = [row for row in rows if any(_fits(column, given) for column in row.columns) or (row.what == DTYPES and _each_fits(row, given))]
    return min(fits, key=lambda row: (bool(row.assumed), row.read), default=None)


def base_of(name: str, form: Fact) -> str:
    """Name in the form of an input or output, whose number in a list is left out."""
    if name in form.inputs or name in form.outputs:
        return name
    base = name.rstrip("0123456789")
    return base if "dynamic" in (form.inputs.get(base), form.outputs.get(base)) else name


def entry_of(tensor: TensorType) -> str:
    """How a column writes a type."""
    return tensor.dtype + (":NZ" if tensor.format == NZ else "")


def _given(node: Node, form: Fact) -> list[tuple[str, TensorType]]:
    """Types by the names that columns use. Tensors without elements stand for absent inputs of a list."""
    inputs = [(base_of(name, form), tensor) for name, tensor in node.inputs.items() if 0 not in tensor.shape]
    outputs = [(f"->{base_of(name, form)}", tensor) for name, tensor in node.outputs.items() if 0 not in tensor.shape]
    return inputs + outputs


def _fits(column: Column, given: list[tuple[str, TensorType]]) -> bool:
    # Torchair gives some outputs names of older releases, which a column lacks; an input under such a name is an error of the form.
    return all(column.get(name) == entry_of(tensor) for name, tensor in given if name in column or not name.startswith("->"))


def _each_fits(row: Fact, given: list[tuple[str, TensorType]]) -> bool:
    return all(entry_of(tensor) in row.dtypes[name] for name, tensor in given if name in row.dtypes)
