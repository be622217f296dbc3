"""Operators of a serialised GE graph as calls whose inputs and attributes are read by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ....graphs.errors import LoweringError
from ..ge_file import GE_DTYPES, GROUPS, STREAM, messages

INT4 = 29
"""Number of int4 in GE; torch has no such dtype."""
_MORE_DTYPES: dict[torch.dtype, tuple[str, int]] = {torch.float64: ("DT_DOUBLE", 11)}
DTYPES: Mapping[int, torch.dtype] = {number: dtype for dtype, (_, number) in (GE_DTYPES | _MORE_DTYPES).items()}
"""Torch dtype by the number that GE's attributes have for it."""


@dataclass(frozen=True)
class Int4:
    """An int4 tensor [..., N] as its packed words: int32 [..., N/8], the first value in the lowest bits."""

    packed: torch.Tensor


Value = torch.Tensor | Int4


@dataclass(frozen=True)
class GeOp:
    """One operator, read once.

    Attributes:
        inputs: `name:port` of each tensor that it reads, "" for one that is absent.
        slots: GE's name of each of `inputs`; those of a list are numbered, as in `x0`, `x1`.
        after: operators that must run before it although it does not read them.
        attrs: values by name; strings are decoded, constants are tensors.
        results: for each output its dtype and sizes as in `bf16[16,2]`, "" where the graph does not declare them.
        stream: label of its stream; "" for the first.
        constants: values of integer inputs that are the same in each run, by slot; filled by who knows them.
    """

    name: str
    type: str
    inputs: tuple[str, ...]
    slots: tuple[str, ...]
    after: tuple[str, ...]
    attrs: Mapping[str, Any]
    results: tuple[str, ...]
    stream: str = ""
    constants: dict[str, list[int]] = field(default_factory=dict, compare=False)

    @functools.cached_property
    def positions(self) -> Mapping[str, int]:
        """Position of each slot among the inputs; of equal names the first."""
        return {slot: i for i, slot in reversed([*enumerate(self.slots)])}

    def __str__(self) -> str:
        return f"{self.name} ({self.type})"


def read(op: Any) -> GeOp:
    """The operator in an `OpDef` message.

    Raises:
        LoweringError: its inputs have no names, or an attribute is of a kind that no operator here has.
    """
    inputs = tuple(tensor for tensor in op.input if not tensor.endswith(":-1"))
    slots = tuple(desc.name for desc in op.input_desc)
    if op.type == "Data":
        slots = ()
    if len(slots) != len(inputs):
        raise LoweringError(f"{op.name} ({op.type}) has {len(inputs)} inputs and names for {len(slots)}: {slots}")
    attrs = {key: _attribute(f"{op.name}.{key}", value) for key, value in op.attr.items() if not key.startswith("_")}
    return GeOp(
        name=op.name,
        type=op.type,
        inputs=inputs,
        slots=slots,
        after=tuple(tensor.removesuffix(":-1") for tensor in op.input if tensor.endswith(":-1")),
        attrs=attrs,
        results=tuple(desc.attr["_meta"].s.decode() if "_meta" in desc.attr else "" for desc in op.output_desc),
        stream=op.attr[STREAM].s.decode() if STREAM in op.attr else "",
    )


def _attribute(where: str, value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "s":
        return value.s.decode()
    if kind in ("i", "f", "b", "dt"):
        return getattr(value, kind)
    if kind == "list":
        items = value.list
        return [x.decode() for x in items.s] or list(items.i) or list(items.f) or list(items.b)
    if kind == "t":
        return _constant(where, value.t)
    raise LoweringError(f"{where} is an attribute of kind {kind}; legal are s, i, f, b, dt, list and t")


def _constant(where: str, message: Any) -> torch.Tensor:
    shape, name = list(message.desc.shape.dim), messages().DataType.Name(message.desc.dtype)
    dtypes = {name: dtype for dtype, (name, _) in (GE_DTYPES | _MORE_DTYPES).items()}
    if name not in dtypes:
        raise LoweringError(f"{where} is a constant of {name}; legal are {', '.join(dtypes)}")
    size = math.prod(shape) * dtypes[name].itemsize
    if len(message.data) != size:
        raise LoweringError(f"{where} is a constant {name}{shape} of {len(message.data)} bytes; legal is {size}")
    if not size:
        return torch.empty(shape, dtype=dtypes[name])
    return torch.frombuffer(bytearray(message.data), dtype=dtypes[name]).reshape(shape)


@dataclass
class Call:
    """One operator with the values of its inputs on one rank.

    The call notes which inputs and attributes a function reads; `finish` refuses an operator that has others.
    """

    op: GeOp
    values: Sequence[Value | None]
    used: set[str] = field(default_factory=set)

    def value(self, slot: str) -> Value | None:
        """An input, or None where it is absent."""
        self.used.add(slot)
        position = self.op.positions.get(slot)
        return None if position is None else self.values[position]

    def optional(self, slot: str) -> torch.Tensor | None:
        """An input that is a tensor, or None where it is absent.

        Raises:
            LoweringError: it is int4.
        """
        value = self.value(slot)
        if isinstance(value, Int4):
            raise LoweringError(
                f"{self.op}: {slot} is int4 {tuple(value.packed.shape)} (packed); this operator takes tensors of torch's types"
            )
        return value

    def tensor(self, slot: str) -> torch.Tensor:
        """An input that must be there.

        Raises:
            LoweringError: it is not.
        """
        value = self.optional(slot)
        if value is None:
            raise LoweringError(f"{self.op}: input {slot} is absent; it has {', '.join(self._present()) or 'none'}")
        return value

    def tensors(self, slot: str) -> list[torch.Tensor]:
        """All inputs of a list, `slot` with a number behind it."""
        return [self.tensor(name) for name in self.op.slots if name.startswith(slot) and name[len(slot) :].isdigit()]

    def single(self, slot: str) -> torch.Tensor | None:
        """The one input of a list, None where it is the empty tensor that stands for an absent one."""
        value = self.tensor(f"{slot}0")
        return value if value.numel() else None

    def integers(self, slot: str) -> list[int]:
        """Values of an integer input: sizes, axes or positions.

        Raises:
            LoweringError: it is absent or not of integers.
        """
        if (known := self.op.constants.get(slot)) is not None:
            self.used.add(slot)
            return [*known]
        value = self.tensor(slot)
        if value.dtype not in (torch.int32, torch.int64):
            raise LoweringError(f"{self.op}: {slot} is {value.dtype}; legal are int32 and int64")
        return [int(item) for item in value.flatten().tolist()]

    def integer(self, slot: str) -> int:
        """The value of an input that is one integer.

        Raises:
            LoweringError: it is absent, not of integers, or not one value.
        """
        values = self.integers(slot)
        if len(values) != 1:
            raise LoweringError(f"{self.op}: {slot} is {values}; legal is one number")
        return values[0]

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute, or GE's default where the graph does not have it."""
        self.used.add(name)
        return self.op.attrs.get(name, default)

    def expect(self, **values: Any) -> None:
        """Refuses attributes whose value is not the given one; absent ones are legal.

        Raises:
            LoweringError: naming attribute, value and the legal one.
        """
        for name, value in values.items():
            if (actual := self.attr(name, value)) != value:
                raise LoweringError(f"{self.op}: attribute {name} is {actual!r}; the interpreter knows {value!r} only")

    def ignore(self, *names: str) -> None:
        """Notes attributes that change how an operator runs and not its result."""
        self.used.update(names)

    def dtype(self, name: str, default: int | None = None) -> torch.dtype:
        """The dtype whose GE number an attribute holds.

        Raises:
            LoweringError: the number is unknown.
        """
        number = self.attr(name, default)
        if number not in DTYPES:
            raise LoweringError(f"{self.op}: attribute {name} is dtype number {number}; legal are {sorted(DTYPES)}")
        return DTYPES[number]

    def finish(self) -> None:
        """Refuses inputs and attributes that the function did not read.

        Raises:
            LoweringError: naming them, and those that it read.
        """
        unread = sorted((set(self._present()) | set(self.op.attrs)) - self.used)
        if unread:
            raise LoweringError(
                f"{self.op} has {', '.join(unread)}, which the interpreter does not know; it knows {', '.join(sorted(self.used))}"
            )

    def _present(self) -> list[str]:
        return [name for name, value in zip(self.op.slots, self.values, strict=True) if value is not None]


Results = Value | tuple[Value, ...]
Function = Callable[[Call], Results]
"""Computes an operator on one rank."""


class GroupFunction(Protocol):
    """Computes an operator on all members of a group: their calls in rank order -> the results of those wanted, or of all."""

    def __call__(self, calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
        """The results."""


def same_dtype(call: Call, **tensors: torch.Tensor) -> None:
    """Refuses inputs of several dtypes: GE does not promote.

    Raises:
        LoweringError: naming them.
    """
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        listed = ", ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items())
        raise LoweringError(f"{call.op} takes {listed}; legal is one dtype")


def unary(function: Callable[[torch.Tensor], torch.Tensor], **legal: Any) -> Function:
    """An operator of `x`; `legal` are the only values of its attributes."""

    def run(call: Call) -> Results:
        call.expect(**legal)
        return function(call.tensor("x"))

    return run


def binary(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Function:
    """An operator of `x1` and `x2`, which have one dtype and are broadcast."""

    def run(call: Call) -> Results:
        x1, x2 = call.tensor("x1"), call.tensor("x2")
        same_dtype(call, x1=x1, x2=x2)
        return function(x1, x2)

    return run


def form(
    kernel: Callable[..., Results],
    required: str,
    optional: str = "",
    attributes: Mapping[str, Any] | None = None,
    legal: Mapping[str, Any] | None = None,
    ignored: str = "",
) -> Function:
    """A GE operator as the call of a kernel that takes its inputs and attributes by GE's names.

    Args:
        kernel: takes the required inputs by position, the others by name; `slot=name` gives an input or attribute another name there.
        required, optional: slots, divided by blanks.
        attributes: attribute -> GE's default.
        legal: attribute -> the only value that the kernel knows.
        ignored: attributes that change how the operator runs and not its result.
    """
    slots, defaults, only, skipped = required.split(), attributes or {}, legal or {}, ignored.split()
    optionals = [(slot, name or slot) for slot, _, name in (each.partition("=") for each in optional.split())]
    named = [(slot, name or slot, default) for (slot, _, name), default in ((key.partition("="), value) for key, value in defaults.items())]

    def run(call: Call) -> Results:
        call.expect(**only)
        call.ignore(*skipped)
        options = {name: call.optional(slot) for slot, name in optionals}
        options |= {name: call.attr(slot, default) for slot, name, default in named}
        return kernel(*map(call.tensor, slots), **options)

    return run


def group_of(call: Call) -> str:
    """The symbolic group over which an operator communicates.

    Raises:
        LoweringError: it names none.
    """
    name = call.attr("group") or call.attr("group_ep")
    if not name:
        raise LoweringError(f"{call.op} names no group; legal is one of {', '.join(GROUPS)}")
    return str(name)
