"""Checks every operator of a graph against the table: what CANN would refuse when it compiles, captures or runs it, the build refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ....graphs.errors import LoweringError
from ....graphs.types import Leaf
from ...platform import CANN_RELEASES, Platform
from ..acl_graph.file import AclFile
from ..ge_file import GeFile
from ..operators.legality_rules import rule_of
from ..operators.node import Node
from .graph_rules import GRAPH_RULES, ORDERED_RULES
from .matching import attributes_of, fitting, form_of, types_of
from .nodes import STRUCTURE, Nodes, nodes_of
from .options import check_options
from .table import FORM, PLACE, RULE, Fact, Table, table
from .threads import answered
from .torch_operators import torch_operators

DEFAULT = Platform("ascend910_93", CANN_RELEASES[-1])
"""What a graph is checked for where the caller names no platform."""
STATIC = "Ascend/torchair@fced884 docs/zh/ascend_ir/features/advanced/tiling_schedule_optimize.md: graphs on the device are static"
SMALLEST_MODEL = 1024
"""Width of the narrowest model that kernels of expert exchange are made for (exchange.json of the table)."""
_SHOWN = 8


@dataclass(frozen=True)
class Violation:
    """What CANN does not take.

    Attributes:
        operator: its name in the graph; "" for an option of the graph.
        type: of the operator, or the option's name; of a torch operator `Node.label`.
        message: what was given and what is legal.
        source: where that can be read.
        sizes: whether a size is too small or large, see `Fact.sizes`.
    """

    operator: str
    type: str
    message: str
    source: str
    sizes: bool = False

    def __str__(self) -> str:
        where = f"{self.operator} ({self.type})" if self.operator else f"option {self.type}"
        return f"{where}: {self.message} [{self.source}]"


@dataclass
class CheckedGraph:
    """What a check of a graph found.

    Attributes:
        violations: each kind once, for the first operator that has it.
        copies: how many operators have a violation, by its place in `violations`.
        relied: operators that rely on a fact, by their type and the fact's number.
        assumed: torch operators that rely on an assumption of their row, by what runs them and the assumption.
        algorithms: expert operators by their communicator, and of each by algorithm ("" is the release's first).
    """

    violations: list[Violation] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    relied: Counter[tuple[str, int]] = field(default_factory=Counter)
    assumed: Counter[tuple[str, str]] = field(default_factory=Counter)
    algorithms: dict[str, Counter[str]] = field(default_factory=dict)

    def pairs(self) -> Iterator[tuple[Violation, int]]:
        """Violations, each with the number of its operators."""
        return zip(self.violations, self.copies, strict=True)


def prove(graph: GeFile | AclFile, platform: Platform = DEFAULT, *, sizes: bool = True) -> None:
    """Refuses a graph that CANN would refuse.

    Args:
        sizes: whether limits of sizes count, see `Fact.sizes`.

    Raises:
        LoweringError: naming operators, what was given, what is legal and the source.
    """
    platform = platform if platform.chip else DEFAULT
    kinds: dict[tuple[str, str], tuple[Violation, int]] = {}
    for violation, copies in examine(graph, platform).pairs():
        if sizes or not violation.sizes:
            first, known = kinds.setdefault((violation.type, violation.message), (violation, 0))
            kinds[violation.type, violation.message] = first, known + copies
    if kinds:
        shown = [f"{violation} (and {copies - 1} more)" if copies > 1 else str(violation) for violation, copies in kinds.values()]
        more = f"; and {len(shown) - _SHOWN} other kinds" if len(shown) > _SHOWN else ""
        number = sum(copies for _, copies in kinds.values())
        where = f"CANN {platform.cann} on {platform.chip}"
        raise LoweringError(f"{where} does not take {number} operators or options of the graph: {'; '.join(shown[:_SHOWN])}{more}")


def has_kernels(params: Iterable[Leaf]) -> bool:
    """Whether kernels are made for a model of this size: not for one that was made small to be tested, whose sizes no limit concerns.

    Args:
        params: of one rank; norms have one weight for each value of a token. What stands beside a `weight` has one for each of its rows.
    """
    leaves = {leaf.path: leaf.aval.shape for leaf in params}
    beside = {path for path in leaves if not path.endswith(".weight") and f"{path.rpartition('.')[0]}.weight" in leaves}
    return max((shape[0] for path, shape in leaves.items() if len(shape) == 1 and path not in beside), default=0) >= SMALLEST_MODEL


def examine(graph: GeFile | AclFile, platform: Platform = DEFAULT, facts: Table | None = None) -> CheckedGraph:
    """What CANN would refuse of a graph on a platform, and which rows of the table the graph relies on.

    Args:
        platform: chip, release of CANN and operator packages.
        facts: the table; by default the one of this package.

    Raises:
        LoweringError: as `nodes_of`.
    """
    platform = platform if platform.chip else DEFAULT
    read = nodes_of(graph, platform, facts)
    checker = Checker(facts or table(), platform, graph.options)
    checker.refuse(_dynamic(read))
    kinds: dict[str, list[Node]] = {}
    for node in read.nodes:
        if "comm_alg" in node.attributes:
            checker.checked.algorithms.setdefault(node.group, Counter())[node.attributes["comm_alg"]] += 1
        if node.type not in STRUCTURE:
            kinds.setdefault(node.key, []).append(node)
    for first, *others in kinds.values():
        checker.add(first, 1 + len(others))
    for rule in ORDERED_RULES if graph.ordered else GRAPH_RULES:
        for node, message in rule(read.nodes):
            source = f"rule {rule.__name__}" + answered(rule.__name__, node.type)
            checker.refuse([Violation(node.name, node.label, message, source)])
    for option, message, source in check_options(graph.options, graph.engine):
        checker.refuse([Violation("", option, message, source)])
    return checker.checked


class Checker:
    """Checks operators, each combination of type, operands and attributes once."""

    def __init__(self, facts: Table, platform: Platform, options: Mapping[str, str]) -> None:
        self.checked = CheckedGraph()
        self._facts, self._platform, self._options = facts, platform, options

    def add(self, node: Node, copies: int = 1) -> None:
        """Checks an operator of which the graph has so many copies."""
        rows = self._facts.facts(node.type, self._platform.chip, self._platform.cann, self._platform.packages)
        for place in self.refuse(self._node(node, rows)):
            self.checked.copies[place] = copies
        fit = fitting(node, rows)
        for number in (*((fit.number,) if fit else ()), *(row.number for row in rows if row.what == RULE and _applies(row, node))):
            self.checked.relied[node.type, number] += copies
        if (row := torch_operators().get(node.called)) and row.assumed:
            self.checked.assumed[node.type, row.assumed] += copies

    def refuse(self, violations: Iterable[Violation]) -> list[int]:
        """Notes violations; returns their places."""
        first = len(self.checked.violations)
        self.checked.violations.extend(violations)
        self.checked.copies.extend([1] * (len(self.checked.violations) - first))
        return list(range(first, len(self.checked.violations)))

    def _node(self, node: Node, rows: tuple[Fact, ...]) -> Iterator[Violation]:
        if not any(row.what == FORM for row in rows):
            yield Violation(node.name, node.label, _unknown(node.type, self._facts, self._platform), PLACE)
            return
        for message, source in (*form_of(node, rows), *attributes_of(node, rows)):
            yield Violation(node.name, node.label, message, source)
        for message, source in types_of(node, rows):
            yield Violation(node.name, node.label, message, source + answered("types", node.type))
        for row in rows:
            if row.what == RULE and _applies(row, node):
                wrong = rule_of(node, row.rule)(node, self._options, **row.parameters)
                if wrong:
                    source = row.source or f"assumed: {row.assumed}"
                    yield Violation(node.name, node.label, wrong, source + answered(row.rule, node.type), row.sizes)


def _applies(row: Fact, node: Node) -> bool:
    return all(node.attributes.get(name) in values for name, values in row.when.items())


def _dynamic(read: Nodes) -> Iterator[Violation]:
    for tensor, kind in read.types.items():
        if min(kind.shape, default=0) < 0:
            node = next(node for node in read.nodes if node.name == tensor.rpartition(":")[0])
            message = f"{tensor} is {kind}; legal are sizes that are known when the graph is compiled"
            yield Violation(node.name, node.type, message, STATIC)


def _unknown(operator: str, facts: Table, platform: Platform) -> str:
    rows = [row for row in facts.by_operator.get(operator, ()) if row.what == FORM]
    if not rows:
        return f"the table knows no such operator; legal are the {len(facts.by_operator)} that it has facts about"
    known = sorted({(chip, row.since, row.until, row.package) for row in rows for chip in row.chips})
    places = ", ".join(
        f"{chip} from CANN {since}" + (f" to {until}" if until else "") + (f" with {package}" if package else "")
        for chip, since, until, package in known
    )
    return f"nothing is known of it for {platform.chip} under CANN {platform.cann}; legal is {places}"
