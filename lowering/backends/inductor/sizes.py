"""Graphs whose sizes are values, so that one executable runs every bucket of its kind.

Graphs of one kind that were lowered for different sizes differ in numbers alone. What a number is made of follows from two of them: one
that is 6 in a graph of 6 rows and 10 in one of 10 is the number of rows, whatever else is 6. So the models, which are written for one size,
need not be traced with symbols.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from ....graphs.errors import LoweringError
from ....graphs.step_inputs import LEAST_CHUNK, OPTIONAL_ROWS, kind_of
from ....graphs.types import Bucket, Function, Signature

Sizes = Mapping[str, int]
"""The sizes of a graph that its executable takes as values, by name: rows, where buckets of a kind differ in them tokens a row, and of
inputs that only a few rows have, rows of them."""

Product = tuple[int, tuple[str, ...]]
"""A number of a graph: a factor, and the sizes that it is multiplied with."""

ROWS, TOKENS = "rows", "tokens"

# Even, so that ranks can share them. Of inputs that few rows have there are no more than limits say: of 2 and 46 rows 2 and 8, say, so that
# they do not grow as rows do.
_ROWS, _TOKENS = (2, 46), (116, 148)

EXPECTED: Sizes = {ROWS: 8, TOKENS: 64}
"""Sizes for which a compiler decides what is worth more than one thread; others are 8."""

DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
"""Digest of this file; part of an executable's key, because the text of a lowered graph says nothing of it."""


def samples(bucket: Bucket) -> tuple[Bucket, Bucket]:
    """Two buckets whose graphs tell what in those of this kind is a size. Decode steps have one width, of which nothing is padded."""
    widths = _TOKENS if kind_of(bucket).ragged else (bucket.q_len, bucket.q_len)
    first, second = (Bucket(bucket.kind, rows, width) for rows, width in zip(_ROWS, widths, strict=True))
    return first, second


def sizes_of(bucket: Bucket | Function, signature: Signature) -> Sizes:
    """The sizes that executables of this kind take as values; a function has none."""
    assert isinstance(bucket, Bucket)
    widths = {TOKENS: bucket.q_len} if kind_of(bucket).ragged else {}
    return {ROWS: bucket.batch, **widths} | {leaf.path: leaf.aval.shape[0] for leaf in signature.inputs if leaf.path in OPTIONAL_ROWS}


def product(values: Sequence[int], sizes: Sequence[Sizes]) -> Product | None:
    """What a number that is different in two graphs is made of; None where it is the same in both.

    Raises:
        LoweringError: it is no multiple of sizes.
    """
    if len(set(values)) == 1:
        return None
    first, second = values
    for names in [*((name,) for name in sizes[0]), (ROWS, TOKENS)]:
        if all(name in sizes[0] for name in names):
            one, other = (math.prod(each[name] for name in names) for each in sizes)
            if first % one == 0 and first * other == second * one:
                return first // one, names
    raise LoweringError(f"a number is {first} for sizes {dict(sizes[0])} and {second} for {dict(sizes[1])}; legal are multiples of sizes")


def _value(made_of: Product, sizes: Mapping[str, Any]) -> Any:
    factor, names = made_of
    value = sizes[names[0]]
    for name in names[1:]:
        value = value * sizes[name]
    return value if factor == 1 else value * factor


class Outline(NamedTuple):
    """A node without its numbers, and these: of operands their shapes, of others those among their arguments."""

    form: tuple[object, ...]
    numbers: tuple[int, ...]


def outline(graph: GraphModule) -> list[Outline]:
    """The nodes of a graph in order; graphs of a kind have equal forms."""
    position, found = dict[Node, int](), list[Outline]()
    for node in graph.graph.nodes:
        leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
        fixed = tuple(position[leaf] if isinstance(leaf, Node) else None if type(leaf) is int else repr(leaf) for leaf in leaves)
        target = str(node.target) if node.op.startswith("call") else ""
        shape = tuple(node.meta["val"].shape) if node.op == "placeholder" else ()
        numbers = shape or tuple(leaf for leaf in leaves if type(leaf) is int)
        found.append(Outline((node.op, target, fixed, str(structure), len(shape)), numbers))
        position[node] = len(position)
    return found


Numbers = list[tuple[tuple[object, ...], tuple[tuple[int, Product | None], ...]]]
"""The nodes of all graphs of a kind: the form of each, and of each number its value where it is the same in all, or what it is made of."""


def made_of(graphs: Sequence[GraphModule], sizes: Sequence[Sizes]) -> Numbers:
    """What graphs say of all of their kind; of one graph, that every number is itself.

    Raises:
        LoweringError: they differ in more than numbers, or as `product`.
    """
    outlines = [outline(graph) for graph in graphs]
    forms = [[node.form for node in nodes] for nodes in outlines]
    if any(each != forms[0] for each in forms):
        side_by_side = itertools.zip_longest(*forms, fillvalue=("nothing",))
        at, differing = next((i, seen) for i, seen in enumerate(side_by_side) if len(set(seen)) > 1)
        names = " and ".join(" ".join(map(str, form[:2])) for form in differing)
        raise LoweringError(f"graphs of sizes {' and '.join(str(dict(each)) for each in sizes)} differ at node {at}: {names}")
    return [
        (nodes[0].form, tuple((values[0], product(values, sizes)) for values in zip(*(node.numbers for node in nodes), strict=True)))
        for nodes in zip(*outlines, strict=True)
    ]


def holds(kind: Numbers, graph: GraphModule, sizes: Sizes) -> bool:
    """Whether a graph of these sizes is what others of its kind say."""
    nodes = outline(graph)
    return len(nodes) == len(kind) and all(
        node.form == form and node.numbers == tuple(same if made is None else _value(made, sizes) for same, made in numbers)
        for node, (form, numbers) in zip(nodes, kind, strict=True)
    )


@dataclass(frozen=True)
class CommonGraph:
    """What lowered graphs of a kind have in common, by the name of the body; of what calls them under "".

    Buckets of one row are among them whatever their graphs look like: rows of which there is one are contiguous either way, so that these
    graphs lack copies that others have.
    """

    numbers: Mapping[str, Numbers]

    @staticmethod
    def of(graphs: Sequence[GraphModule], sizes: Sequence[Sizes]) -> CommonGraph:
        """Of two graphs, whose bodies get what they need to know the sizes.

        Raises:
            LoweringError: as `made_of`; or no operand has a size that is needed.
        """
        numbers = {"": made_of(graphs, sizes)} | {
            name: made_of([getattr(graph, name) for graph in graphs], sizes) for name in called(graphs[0])
        }
        hand_on(graphs, sizes)
        return CommonGraph(numbers)

    def holds(self, graph: GraphModule, sizes: Sizes) -> bool:
        """Whether a graph of these sizes is one of them."""
        if sizes[ROWS] == 1:
            return True
        modules = {name: getattr(graph, name) for name in called(graph)} | {"": graph}
        return modules.keys() == self.numbers.keys() and all(holds(self.numbers[name], modules[name], sizes) for name in modules)


def needed(kind: Numbers) -> set[str]:
    """The sizes that nodes compute with and no operand has as a dimension."""
    carried, wanted = set[str](), set[str]()
    for form, numbers in kind:
        products = [found for _, found in numbers if found]
        if form[0] == "placeholder":
            carried |= {names[0] for factor, names in products if (factor, len(names)) == (1, 1)}
        else:
            wanted |= {name for _, names in products for name in names}
    return wanted - carried


def hand_on(graphs: Sequence[GraphModule], sizes: Sequence[Sizes]) -> None:
    """Gives bodies an operand of the graph that has the sizes which theirs do not have.

    Raises:
        LoweringError: as `made_of`; or no operand of the graph has them.
    """
    for name in called(graphs[0]):
        bodies = [getattr(graph, name) for graph in graphs]
        if missing := needed(made_of(bodies, sizes)):
            position = _carrier(made_of(graphs, sizes), missing)
            for graph, body in zip(graphs, bodies, strict=True):
                _append(graph, name, body, position)


def called(graph: GraphModule) -> list[str]:
    """The bodies that a graph calls, in order."""
    return list(dict.fromkeys(str(node.target) for node in graph.graph.nodes if node.op == "call_module"))


def _carrier(kind: Numbers, missing: set[str]) -> int:
    """The position of an operand of the graph that has all the missing sizes as dimensions."""
    for position, (form, numbers) in enumerate(kind):
        if form[0] == "placeholder" and {(1, (name,)) for name in missing} <= {found for _, found in numbers}:
            return position
    raise LoweringError(f"no operand of the graph has the sizes {sorted(missing)}, and a body computes with them")


def _append(graph: GraphModule, name: str, body: GraphModule, position: int) -> None:
    operand = [node for node in graph.graph.nodes if node.op == "placeholder"][position]
    last = [node for node in body.graph.nodes if node.op == "placeholder"][-1]
    with body.graph.inserting_after(last):
        added = body.graph.placeholder("sizes")
    added.meta = {"val": operand.meta["val"]}
    for node in graph.graph.nodes:
        if node.op == "call_module" and node.target == name:
            node.args = (*node.args, operand)


def with_values(graphs: Sequence[GraphModule], sizes: Sequence[Sizes]) -> tuple[GraphModule, list[torch.Tensor]]:
    """The graph whose sizes are values, and fake operands for it whose shapes have symbols.

    Raises:
        LoweringError: as `made_of`.
    """
    kind = made_of(graphs, sizes)
    graph, values, products = Graph(), dict[Node, Node](), _Products()
    mode, symbols = _symbols(sizes[0])
    operands = list[torch.Tensor]()
    for node, (_, numbers) in zip(graphs[0].graph.nodes, kind, strict=True):
        if node.op == "placeholder":
            values[node] = graph.placeholder(node.name)
            shape = [same if made is None else _value(made, symbols) for same, made in numbers]
            with mode:
                operands.append(torch.empty(shape, dtype=node.meta["val"].dtype))
            products.read(values[node], [made for _, made in numbers])
            continue
        rest = iter(numbers)
        leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
        made = [values[leaf] if isinstance(leaf, Node) else products(graph, *next(rest)) if type(leaf) is int else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(made, structure)
        values[node] = graph.output(args[0]) if node.op == "output" else graph.call_function(node.target, args, kwargs)
    return GraphModule(torch.nn.Module(), graph), operands


def check_unguarded(operands: Sequence[torch.Tensor]) -> None:
    """Checks that what was compiled for fake operands holds for all sizes.

    Raises:
        LoweringError: with the conditions under which it holds.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    modes = {operand.fake_mode for operand in operands if isinstance(operand, FakeTensor)}
    guards = {str(guard.expr) for mode in modes if mode.shape_env for guard in mode.shape_env.guards}
    if guards:
        raise LoweringError(f"the compiled code holds for {', '.join(sorted(guards))} alone; expected code for all sizes")


def _symbols(names: Iterable[str]) -> tuple[FakeTensorMode, dict[str, Any]]:
    """A mode for fake tensors, and in it a symbol for each size."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    shapes, found = ShapeEnv(), dict[str, Any]()
    for name in names:
        source = ConstantSource(f"size_{name}")
        hint = EXPECTED.get(name, EXPECTED[ROWS])
        legal = StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(LEAST_CHUNK if name == TOKENS else 1, int_oo))
        symbol = shapes.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=legal)
        found[name] = shapes.create_symintnode(symbol, hint=hint, source=source)
    return FakeTensorMode(shape_env=shapes if found else None), found


class _Products:
    """The nodes that compute the numbers of a graph from dimensions of its operands, each once."""

    def __init__(self) -> None:
        self._dimensions = dict[str, tuple[Node, int]]()
        self._made = dict[Product, int | Node]()

    def read(self, operand: Node, shape: Sequence[Product | None]) -> None:
        """Tells of an operand what its dimensions are made of."""
        for axis, made in enumerate(shape):
            if made and made[0] == 1 and len(made[1]) == 1:
                self._dimensions.setdefault(made[1][0], (operand, axis))

    def __call__(self, graph: Graph, same: int, made: Product | None) -> int | Node:
        if made is None:
            return same
        factor, (name, *others) = made
        if made not in self._made and (factor, others) == (1, []):
            self._made[made] = graph.call_function(torch.ops.aten.sym_size.int, self._dimensions[name])
        elif made not in self._made:
            value = self(graph, 0, (1, (name,)))
            for other in others:
                value = graph.call_function(operator.mul, (value, self(graph, 0, (1, (other,)))))
            self._made[made] = value if factor == 1 else graph.call_function(operator.mul, (value, factor))
        return self._made[made]
