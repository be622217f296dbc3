"""Primitives: opaque graph nodes, each with a record of its operands and independent rules over that record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_type_hints

import torch

from .errors import PrimitiveError
from .factors import REST, WHOLE, Factors
from .types import Aval

NAMESPACE = "npuc"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

TABLE: dict[str, Primitive[Any]] = {}
"""Every primitive by name; filled when `graphs.ops` is imported."""

Rule = Callable[..., Any]

Operands = TypeVar("Operands", bound=tuple[Any, ...])
Result = TypeVar("Result")

_SCHEMA_TYPES = {torch.Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType"}
"""Type of a record's field -> its type in an operator's schema."""


@dataclass(frozen=True)
class Cost:
    """What one node costs.

    Attributes:
        flops: multiplications and additions.
        read_bytes: bytes read from operands.
        write_bytes: bytes written to results.
    """

    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.read_bytes + other.read_bytes, self.write_bytes + other.write_bytes)


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of dense tensors; None counts nothing."""
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors if t is not None)


def _as_returned(results: Sequence[Any]) -> Any:
    """Results as an operator returns them."""
    return results[0] if len(results) == 1 else tuple(results) or None


def _returns(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _facet(kind: str, needs: Iterable[str]) -> str:
    """Name of a lowering's facet, as in `lowering:npu` or `lowering:npu+cann>=9.0`."""
    return "+".join((f"lowering:{kind}", *sorted(needs)))


class Primitive(Generic[Operands]):
    """One opaque operation: `torch.ops.npuc.<name>` in graphs, plain torch outside them.

    A primitive's file states its operands once, as a NamedTuple, and gives it rules with the decorators below. Callers (models, graphs,
    backends) pass operands one by one; every rule takes them as one record:

        class Scale(NamedTuple):
            x: Tensor  # [T, M]
            factor: float

        scale = Primitive("scale", Scale, factors="t m -> t m")

        @scale.reference
        def scale_reference(args: Scale) -> Tensor:
            return args.x * args.factor

    A rule that is missing fails by the primitive's name when it is first needed.

    Args:
        name: operator name in the `npuc` namespace.
        operands: record whose fields, in order, are the operator's arguments: a Tensor is an operand; int, float, bool, str and
            torch.dtype are attributes, fixed when the graph is built.
        factors: sharding rule, e.g. `"t k, n k -> t n; sum k"`: one group of letters per tensor operand and result, in
            order; `_` is a dimension that stays whole. A letter may be sharded when all its carriers are; a letter
            that some result lacks must be declared `sum` (that result is then a partial sum), else it stays whole.
        donates: (operand index, result index) pairs: the result is the operand with some elements replaced. The rule
            `inplace` then does the same into the operand itself. Where all results are such, they have the abstract rule by that.
        like: the operand whose dtype the one result has, contiguous, and whose shape, unless the factors give the result's: the abstract
            rule of many.
        travels: it sends rows to other devices, on a stream beside that of kernels where a graph has several such.

    Attributes:
        arguments: names of the operator's arguments, in order.
        schema: torch operator schema without the name; results are as many tensors as the factors have groups.

    Raises:
        PrimitiveError: when the name is taken, the factor string is malformed or counts other tensors than the record, or a field of
            the record has another type.
    """

    def __init__(
        self,
        name: str,
        operands: type[Operands],
        *,
        factors: str,
        donates: tuple[tuple[int, int], ...] = (),
        like: str = "",
        travels: bool = False,
    ) -> None:
        if name in TABLE:
            raise PrimitiveError(f"primitive {name!r} is defined twice; names are unique")
        self.name, self.factors, self.donates, self.travels = name, Factors.parse(factors), donates, travels
        types = get_type_hints(operands)
        if strange := {field: kind for field, kind in types.items() if kind not in _SCHEMA_TYPES}:
            legal = ", ".join(kind.__name__ for kind in _SCHEMA_TYPES)
            raise PrimitiveError(f"primitive {name!r}: {operands.__name__} has fields {strange}; legal types are {legal}")
        self.arguments = tuple(types)
        self.tensor_arguments = [kind is torch.Tensor for kind in types.values()]
        if sum(self.tensor_arguments) != len(self.factors.operands):
            raise PrimitiveError(
                f"primitive {name!r}: its factors {factors!r} have {len(self.factors.operands)} operands, "
                f"{operands.__name__} has {sum(self.tensor_arguments)} tensors"
            )
        arguments = ", ".join(f"{_SCHEMA_TYPES[kind]} {field}" for field, kind in types.items())
        self.schema = f"({arguments}) -> {_returns(len(self.factors.results))}"
        self._operands = operands
        self._rules: dict[str, Rule] = {}
        self._variants: dict[str, list[frozenset[str]]] = {}
        _LIBRARY.define(f"{name}{self.schema}")
        self.op = getattr(getattr(torch.ops, NAMESPACE), name).default
        TABLE[name] = self
        if like:
            self.abstract(lambda args: getattr(args, like).new_empty(self._result_shape(args) or getattr(args, like).shape))
        elif len(donates) == len(self.factors.results):
            pools = [operand for operand, _ in sorted(donates, key=lambda pair: pair[1])]
            self.abstract(lambda args: _as_returned([torch.empty_like(args[pool]) for pool in pools]))

    def _result_shape(self, args: tuple[Any, ...]) -> list[int] | None:
        """Shape of the one result by its letters; of packed operands the larger size counts. None where a dimension has no letter."""
        tensors = [a for a, wanted in zip(args, self.tensor_arguments, strict=True) if wanted]
        (result,) = self.factors.results
        if {WHOLE, REST} & set(result):
            return None
        groups = zip(self.factors.operands, tensors, strict=True)
        carried = [pair for group, tensor in groups for pair in zip(group, tensor.shape, strict=True)]
        return [max(size for each, size in carried if each == letter) for letter in result]

    def rule(self, facet: str) -> Rule:
        """The rule of one facet, as a function of the operands one by one.

        Raises:
            PrimitiveError: naming the primitive, the missing facet and the facets it has.
        """
        if facet not in self._rules:
            raise PrimitiveError(f"primitive {self.name!r} has no rule {facet!r}; it has {sorted(self._rules)}")
        return self._rules[facet]

    def has(self, facet: str) -> bool:
        return facet in self._rules

    def _register(self, facet: str, fn: Callable[[Operands], Any]) -> Rule:
        """Stores a rule behind the operator's own calling convention."""

        def rule(*args: Any, **kwargs: Any) -> Any:
            return fn(self._operands(*args, **kwargs))

        # Not functools.wraps: torch's tracers look through `__wrapped__` and would see a function of one argument.
        rule.__module__, rule.__name__ = fn.__module__, fn.__name__
        self._rules[facet] = rule
        return rule

    def abstract(self, fn: Callable[[Operands], Result]) -> Callable[[Operands], Result]:
        """Decorates the shape rule: operands are meta tensors, results are new meta tensors."""
        _LIBRARY.impl(self.name, self._register("abstract", fn), "Meta")
        return fn

    def reference(self, fn: Callable[[Operands], Result]) -> Callable[[Operands], Result]:
        """Decorates the plain-torch meaning: the oracle of every backend, differentiable where that makes sense."""
        _LIBRARY.impl(self.name, self._register("reference", fn), "CompositeExplicitAutograd")
        return fn

    def inplace(self, fn: Callable[[Operands], Result]) -> Callable[[Operands], Result]:
        """Decorates the in-place variant of the reference, `npuc.<name>_`: it writes the donated operands.

        The rule returns all results, donated operands included; the operator returns the others only.
        """
        _LIBRARY.define(f"{self.name}_{self._inplace_schema()}")
        inplace = self._register("inplace", fn)

        def kernel(*args: Any) -> Any:
            return self._without_donated(inplace(*args))

        def meta(*args: Any) -> Any:
            return self._without_donated(self.rule("abstract")(*args))

        _LIBRARY.impl(f"{self.name}_", kernel, "CompositeExplicitAutograd")
        _LIBRARY.impl(f"{self.name}_", meta, "Meta")
        return fn

    def _without_donated(self, results: Sequence[Any]) -> Any:
        return _as_returned([results[i] for i in self.kept_results])

    @property
    def inplace_op(self) -> torch._ops.OpOverload:
        """The operator of the in-place variant.

        Raises:
            PrimitiveError: when the primitive has none.
        """
        self.rule("inplace")
        op: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), f"{self.name}_").default
        return op

    @property
    def kept_results(self) -> list[int]:
        """Indices of results that are not donated operands; what the in-place variant returns."""
        donated = {result for _, result in self.donates}
        return [i for i in range(len(self.factors.results)) if i not in donated]

    def _inplace_schema(self) -> str:
        donated = {operand: chr(ord("a") + i) for i, (operand, _) in enumerate(self.donates)}
        arguments = []
        # Not of the operator's own schema, where the type of a torch.dtype reads "int".
        for i, (name, kind) in enumerate(get_type_hints(self._operands).items()):
            arguments.append(f"Tensor({donated[i]}!) {name}" if i in donated else f"{_SCHEMA_TYPES[kind]} {name}")
        return f"({', '.join(arguments)}) -> {_returns(len(self.kept_results))}"

    def group_reference(self, fn: Callable[[list[Operands]], list[Result]]) -> Callable[[list[Operands]], list[Result]]:
        """Decorates the meaning of a primitive that communicates: the calls of all devices of a group -> their results.

        The rule takes a list of records, one a device in the order of the group, and returns a list of results. A
        record of such a primitive has a field `group`, the symbolic name of the group.
        """

        def rule(calls: Iterable[tuple[Any, ...]]) -> list[Result]:
            return fn([self._operands(*args) for args in calls])

        self._rules["group_reference"] = rule
        return fn

    def cost(self, fn: Callable[[Operands], Cost]) -> Callable[[Operands], Cost]:
        """Decorates the cost rule: operands as given, tensors may be meta; returns a Cost."""
        self._register("cost", fn)
        return fn

    def lowering(self, kind: str, *, needs: tuple[str, ...] = ()) -> Callable[[Callable[[Operands], Result]], Callable[[Operands], Result]]:
        """Decorates a lowering: a torch function that a backend traces in place of the node.

        Args:
            kind: kind of device, e.g. "inductor" or "npu".
            needs: features that a platform must have for this variant (lowering/platform.py); of several the one that needs most is used.
        """

        def register(fn: Callable[[Operands], Result]) -> Callable[[Operands], Result]:
            self._register(_facet(kind, needs), fn)
            self._variants.setdefault(kind, []).append(frozenset(needs))
            return fn

        return register

    def lower_for(self, kind: str, features: frozenset[str] = frozenset()) -> Rule:
        """The lowering for a kind of device; the reference where there is none.

        Args:
            features: what the platform has.
        """
        # `sorted` keeps the order of equals: of variants that need equally many features the last one in the file is taken.
        fitting = sorted((needs for needs in self._variants.get(kind, ()) if needs <= features), key=len)
        return self._rules[_facet(kind, fitting[-1])] if fitting else self.rule("reference")

    def __call__(self, *args: Any) -> Any:
        """Calls the operator; goes through the reference where a gradient is wanted.

        Raises:
            PrimitiveError: naming the primitive, its schema and the operands, when these do not fit the schema, the ranks of
                the factors, or each other where they share a letter (one size may be a multiple of the other: grouped heads).
        """
        self._check(args)
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return self.rule("reference")(*args)
        return self.op(*args)

    def _check(self, args: tuple[Any, ...]) -> None:
        if len(args) != len(self.tensor_arguments):
            raise self._refusal(args, f"{len(args)} arguments")
        tensors = [a for a, wanted in zip(args, self.tensor_arguments, strict=True) if wanted]
        if not all(isinstance(a, torch.Tensor) for a in tensors):
            raise self._refusal(args, "an operand is not a tensor")
        try:
            factors = self.factors.ranked([a.dim() for a in tensors])
        except PrimitiveError as error:
            raise self._refusal(args, str(error)) from None
        sizes: dict[str, int] = {}
        for group, tensor in zip(factors.operands, tensors, strict=True):
            for letter, size in zip(group, tensor.shape, strict=True):
                low, high = sorted((size, sizes.setdefault(letter, size)))
                if letter != WHOLE and high % max(low, 1):
                    raise self._refusal(args, f"{letter!r} has sizes {low} and {high}")

    def _refusal(self, args: tuple[Any, ...], why: str) -> PrimitiveError:
        arguments = ", ".join(str(Aval(tuple(a.shape), a.dtype)) if isinstance(a, torch.Tensor) else repr(a) for a in args)
        return PrimitiveError(f"primitive {self.name!r} takes {self.schema}, it was called with ({arguments}): {why}")

    def __repr__(self) -> str:
        return f"Primitive({self.name})"


def of_target(target: object) -> Primitive[Any] | None:
    """The primitive behind an FX node's target, or None for any other operator."""
    return TABLE.get(target._opname) if isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE else None


def of_inplace(target: object) -> Primitive[Any] | None:
    """The primitive whose in-place variant an FX node calls, or None for any other operator."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE and target._opname.endswith("_"):
        return TABLE.get(target._opname[:-1])
    return None
