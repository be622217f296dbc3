"""Turns a name and a schema into a primitive: an opaque graph node whose facets are independent rules in one table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .errors import PrimitiveError
from .factors import WHOLE, Factors
from .types import Aval

NAMESPACE = "npuc"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

TABLE: dict[str, Primitive] = {}
"""Every primitive by name; filled when `graphs.ops` is imported."""

Rule = Callable[..., Any]


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


class Primitive:
    """One operation of the house: `torch.ops.npuc.<name>` in graphs, plain torch outside them.

    A primitive's file creates it and fills its rules with the decorators below. A rule that is missing fails by the
    primitive's name when it is first needed.

    Args:
        name: operator name in the `npuc` namespace.
        schema: torch operator schema without the name.
        factors: sharding rule, e.g. `"t k, n k -> t n; sum k"`: one group of letters per tensor operand and result, in
            schema order; `_` is a dimension that stays whole. A letter may be sharded when all its carriers are; a letter
            that some result lacks must be declared `sum` (that result is then a partial sum), else it stays whole.
        donates: (operand index, result index) pairs: the result is the operand with some elements replaced. The rule
            `inplace` then does the same into the operand itself.

    Raises:
        PrimitiveError: when the name is taken, the factor string is malformed, or it counts other tensors than the schema.
    """

    def __init__(self, name: str, schema: str, *, factors: str, donates: tuple[tuple[int, int], ...] = ()) -> None:
        if name in TABLE:
            raise PrimitiveError(f"primitive {name!r} is defined twice; names are unique")
        self.name, self.schema, self.factors, self.donates = name, schema, Factors.parse(factors), donates
        parsed = torch._C.parse_schema(f"{NAMESPACE}::{name}{schema}")
        self.tensor_arguments = [isinstance(a.type, torch.TensorType) for a in parsed.arguments]
        counts = (sum(self.tensor_arguments), len(parsed.returns))
        if counts != (len(self.factors.operands), len(self.factors.results)):
            raise PrimitiveError(
                f"primitive {name!r}: its factors {factors!r} have {len(self.factors.operands)} operands and "
                f"{len(self.factors.results)} results, its schema {schema} has {counts[0]} and {counts[1]}"
            )
        self._rules: dict[str, Rule] = {}
        _LIBRARY.define(f"{name}{schema}")
        self.op = getattr(getattr(torch.ops, NAMESPACE), name).default
        TABLE[name] = self

    def rule(self, facet: str) -> Rule:
        """The rule of one facet.

        Raises:
            PrimitiveError: naming the primitive, the missing facet and the facets it has.
        """
        if facet not in self._rules:
            raise PrimitiveError(f"primitive {self.name!r} has no rule {facet!r}; it has {sorted(self._rules)}")
        return self._rules[facet]

    def has(self, facet: str) -> bool:
        return facet in self._rules

    def abstract(self, fn: Rule) -> Rule:
        """Decorates the shape rule: operands are meta tensors, results are new meta tensors."""
        self._rules["abstract"] = fn
        _LIBRARY.impl(self.name, fn, "Meta")
        return fn

    def reference(self, fn: Rule) -> Rule:
        """Decorates the plain-torch meaning: the oracle of every backend, differentiable where that makes sense."""
        self._rules["reference"] = fn
        _LIBRARY.impl(self.name, fn, "CompositeExplicitAutograd")
        return fn

    def inplace(self, fn: Rule) -> Rule:
        """Decorates the donating twin of the reference, `npuc.<name>_`: it writes the donated operands in place.

        The rule returns all results, donated operands included; the operator returns the others only.
        """
        self._rules["inplace"] = fn
        _LIBRARY.define(f"{self.name}_{self._inplace_schema()}")
        rest = self.kept_results

        def kernel(*args: Any) -> Any:
            results = fn(*args)
            kept = tuple(results[i] for i in rest)
            return kept[0] if len(kept) == 1 else kept or None

        def meta(*args: Any) -> Any:
            results = self.rule("abstract")(*args)
            kept = tuple(results[i] for i in rest)
            return kept[0] if len(kept) == 1 else kept or None

        _LIBRARY.impl(f"{self.name}_", kernel, "CompositeExplicitAutograd")
        _LIBRARY.impl(f"{self.name}_", meta, "Meta")
        return fn

    @property
    def inplace_op(self) -> torch._ops.OpOverload:
        """The operator of the donating twin.

        Raises:
            PrimitiveError: when the primitive has none.
        """
        self.rule("inplace")
        op: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), f"{self.name}_").default
        return op

    @property
    def kept_results(self) -> list[int]:
        """Indices of results that are not donated operands; what the donating twin returns."""
        donated = {result for _, result in self.donates}
        return [i for i in range(len(self.op._schema.returns)) if i not in donated]

    def _inplace_schema(self) -> str:
        donated = {operand: chr(ord("a") + i) for i, (operand, _) in enumerate(self.donates)}
        arguments = []
        for i, argument in enumerate(self.op._schema.arguments):
            kind = f"Tensor({donated[i]}!)" if i in donated else str(argument.type)
            arguments.append(f"{kind} {argument.name}")
        kept = ["Tensor"] * len(self.kept_results)
        return f"({', '.join(arguments)}) -> {kept[0] if len(kept) == 1 else '(' + ', '.join(kept) + ')'}"

    def together(self, fn: Rule) -> Rule:
        """Decorates the meaning of a primitive that communicates: the calls of all devices of a group -> their results.

        The rule takes a list of argument tuples, one a device in the order of the group, and returns a list of results. A
        schema of such a primitive has an argument `group`, the symbolic name of the group.
        """
        self._rules["together"] = fn
        return fn

    def cost(self, fn: Callable[..., Cost]) -> Callable[..., Cost]:
        """Decorates the cost rule: operands as given, tensors may be meta; returns a Cost."""
        self._rules["cost"] = fn
        return fn

    def lowering(self, backend: str) -> Callable[[Rule], Rule]:
        """Decorates a lowering: a torch function that a backend traces in place of the node."""

        def register(fn: Rule) -> Rule:
            self._rules[f"lowering:{backend}"] = fn
            return fn

        return register

    def lower_for(self, backend: str) -> Rule:
        """The lowering for a backend; the reference where the backend has none of its own."""
        return self._rules.get(f"lowering:{backend}") or self.rule("reference")

    def __call__(self, *args: Any) -> Any:
        """Calls the node; differentiates through the reference where a gradient is wanted.

        Raises:
            PrimitiveError: naming the primitive, its schema and the operands, when these do not fit the schema, the ranks of
                the factors, or each other where they share a letter (there one size may be a multiple: grouped heads).
        """
        self._check(args)
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return self.rule("reference")(*args)
        return self.op(*args)

    def _check(self, args: tuple[Any, ...]) -> None:
        if len(args) != len(self.tensor_arguments):
            raise self._refusal(args, f"{len(args)} arguments")
        given = [a for a, wanted in zip(args, self.tensor_arguments, strict=True) if wanted]
        if not all(isinstance(a, torch.Tensor) for a in given):
            raise self._refusal(args, "an operand is not a tensor")
        try:
            factors = self.factors.ranked([a.dim() for a in given])
        except PrimitiveError as error:
            raise self._refusal(args, str(error)) from None
        sizes: dict[str, int] = {}
        for group, tensor in zip(factors.operands, given, strict=True):
            for letter, size in zip(group, tensor.shape, strict=True):
                low, high = sorted((size, sizes.setdefault(letter, size)))
                if letter != WHOLE and high % max(low, 1):
                    raise self._refusal(args, f"{letter!r} has sizes {low} and {high}")

    def _refusal(self, args: tuple[Any, ...], why: str) -> PrimitiveError:
        given = ", ".join(str(Aval(tuple(a.shape), a.dtype)) if isinstance(a, torch.Tensor) else repr(a) for a in args)
        return PrimitiveError(f"primitive {self.name!r} takes {self.schema}, it was called with ({given}): {why}")

    def __repr__(self) -> str:
        return f"Primitive({self.name})"


def of_target(target: object) -> Primitive | None:
    """The primitive behind an FX node's target, or None for any other operator."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE:
        return TABLE.get(target._schema.name.split("::")[1])
    return None
