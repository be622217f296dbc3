"""Checks every operator of a GE graph against the table: what CANN would refuse when it compiles the graph, the build refuses."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ....graphs.errors import LoweringError
from ....graphs.types import Leaf
from ...platform import CANN_RELEASES, Platform
from ..ge_file import GeFile
from ..ge_operators import Operator, by_kind, read
from ..ge_types import tensor_types
from ..operators.tensor_type import TensorType
from .matching import attributes_of, fitting, form_of, types_of
from .node import Key, Node, node_of, own_key, tensors_of
from .options import check_options
from .rules import RULES
from .table import FORM, PLACE, RULE, Fact, Table, table
from .thread_rules import GRAPH_RULES
from .threads import answered

STRUCTURE = frozenset({"Data", "Const", "NetOutput"})
"""Operators that are the graph's inputs, constants and results; they run nothing."""
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
class Checked:
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


def check(ge_file: GeFile, platform: Platform = DEFAULT, facts: Table | None = None) -> list[Violation]:
    """What CANN would refuse of a graph on a platform; empty where every operator and option is legal.

    Args:
        platform: chip, release of CANN and operator packages.
        facts: the table; by default the one of this package.

    Raises:
        LoweringError: the graph is no GE model, or types of its tensors do not follow from it.
    """
    return examine(ge_file, platform, facts).violations


def prove(ge_file: GeFile, platform: Platform = DEFAULT, *, sizes: bool = True) -> None:
    """Refuses a graph that CANN would refuse.

    Args:
        sizes: whether limits of sizes count, see `Fact.sizes`.

    Raises:
        LoweringError: naming operators, what was given, what is legal and the source.
    """
    refuse(examine(ge_file, platform), platform, sizes=sizes)


def refuse(checked: Checked, platform: Platform, *, sizes: bool = True) -> None:
    """Raises the error of `prove` where a check found something."""
    platform = platform if platform.chip else DEFAULT
    kinds: dict[tuple[str, str], tuple[Violation, int]] = {}
    for violation, copies in checked.pairs():
        if sizes or not violation.sizes:
            first, known = kinds.setdefault((violation.type, violation.message), (violation, 0))
            kinds[violation.type, violation.message] = first, known + copies
    if kinds:
        told = [f"{violation} (and {copies - 1} more)" if copies > 1 else str(violation) for violation, copies in kinds.values()]
        more = f"; and {len(told) - _SHOWN} other kinds" if len(told) > _SHOWN else ""
        number = sum(copies for _, copies in kinds.values())
        where = f"CANN {platform.cann} on {platform.chip}"
        raise LoweringError(f"{where} does not take {number} operators or options of the graph: {'; '.join(told[:_SHOWN])}{more}")


def has_kernels(params: Iterable[Leaf]) -> bool:
    """Whether kernels are made for a model of this size: not for one that was made small to be tested, whose sizes no limit concerns.

    Args:
        params: of one rank; norms have one weight for each value of a token.
    """
    return max((leaf.aval.shape[0] for leaf in params if len(leaf.aval.shape) == 1), default=0) >= SMALLEST_MODEL


def examine(ge_file: GeFile, platform: Platform = DEFAULT, facts: Table | None = None) -> Checked:
    """`check`, with how many operators each violation has, and which rows of the table the graph relies on."""
    platform = platform if platform.chip else DEFAULT
    types = tensor_types(ge_file)
    checker = Checker(facts or table(), platform, ge_file.options)
    ops, key_of = read(ge_file.graph), keys()
    checker.refuse(_dynamic(ops, types))
    for op, constants in _computed(ops):
        if "comm_alg" in op.attr:
            used = checker.checked.algorithms.setdefault(op.attr["group_ep"].s.decode(), Counter())
            used[op.attr["comm_alg"].s.decode()] += 1
        if op.type not in STRUCTURE:
            checker.add(key_of(op, types, constants), functools.partial(node_of, op, types, constants))
    for name, rule in GRAPH_RULES.items():
        checker.refuse(Violation(op.name, op.type, message, f"rule {name}" + answered(name, op.type)) for op, message in rule(ops))
    for option, message, source in check_options(ge_file.options, ge_file.engine):
        checker.refuse([Violation("", option, message, source)])
    return checker.checked


def keys() -> Callable[[Operator, Mapping[str, TensorType], set[str]], Key]:
    """As `node.key_of`, for the operators of one graph: what is equal for all operators of a kind is computed once."""
    numbers: dict[Key, int] = {}
    own = by_kind(lambda op: (numbers.setdefault(own_key(op), len(numbers)), len(op.input_desc), len(op.output_desc)))

    def key(op: Operator, types: Mapping[str, TensorType], constants: set[str]) -> Key:
        number, inputs, outputs = own(op)
        return number, *tensors_of(op, inputs, outputs, types, constants)

    return key


class Checker:
    """Checks operators, each combination of type, operands and attributes once."""

    def __init__(self, facts: Table, platform: Platform, options: Mapping[str, str]) -> None:
        self.checked = Checked()
        self._facts, self._platform, self._options = facts, platform, options
        self._known: dict[Key, tuple[list[int], tuple[tuple[str, int], ...]]] = {}

    def add(self, key: Key, view: Callable[[], Node]) -> None:
        """Checks one operator.

        Args:
            key: equal for operators of which the same is legal.
            view: the operator; called where its key is new.
        """
        if key not in self._known:
            node = view()
            rows = self._facts.facts(node.type, self._platform.chip, self._platform.cann, self._platform.packages)
            places = self.refuse(self._node(node, rows))
            fit = fitting(node, rows)
            numbers = (*((fit.number,) if fit else ()), *(row.number for row in rows if row.what == RULE and _applies(row, node)))
            self._known[key] = places, tuple((node.type, number) for number in numbers)
        else:
            for place in self._known[key][0]:
                self.checked.copies[place] += 1
        self.checked.relied.update(self._known[key][1])

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
                wrong = RULES[row.rule](node, self._options, **row.parameters)
                if wrong:
                    source = row.source or f"assumed: {row.assumed}"
                    yield Violation(node.name, node.label, wrong, source + answered(row.rule, node.type), row.sizes)


def _computed(ops: Iterable[Operator]) -> Iterator[tuple[Operator, set[str]]]:
    """Operators in order, each with the names of those before it that are computed from constants alone."""
    constants: set[str] = set()
    for op in ops:
        yield op, constants
        if op.type == "Const" or (op.producers and op.type not in STRUCTURE and constants.issuperset(op.producers)):
            constants.add(op.name)


def _applies(row: Fact, node: Node) -> bool:
    return all(node.attributes.get(name) in values for name, values in row.when.items())


def _dynamic(ops: Iterable[Operator], types: Mapping[str, TensorType]) -> Iterator[Violation]:
    dynamic = {name: tensor for name, tensor in types.items() if min(tensor.shape, default=0) < 0}
    for op in ops if dynamic else ():
        for tensor in (f"{op.name}:{port}" for port in range(len(op.output_desc))):
            if tensor in dynamic:
                message = f"{tensor} is {dynamic[tensor]}; legal are sizes that are known when the graph is compiled"
                yield Violation(op.name, op.type, message, STATIC)


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
