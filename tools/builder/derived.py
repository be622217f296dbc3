"""Buckets of an NPU whose graphs follow from those of three others of their kind: nothing in them differs but numbers that grow with rows.

A program may ask for its size, and do another thing from some size on. So the three are far from each other, and graphs of a few more,
drawn, are made as well: where one has another byte than what follows for it, each bucket of the kind is made. So is a bucket of whose
size a number happens to be a constant of the graph, if passes then merge or drop operators; such a one says nothing of others.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...graphs.errors import LoweringError
from ...graphs.passes.drop_noops import SHAPES
from ...graphs.types import Bucket, Signature
from ...lowering.backend import Claims, CompiledFile, backend
from ...lowering.between import Form, between
from ..progress import Progress
from .planned import Plan
from .pool import CompileJob, CompileResult, StagedRecord, graph_key_of, rewriting, run_all
from .stages import pack_texts, unpack_texts

LEAST = 8
"""With fewer buckets of a kind there is nothing to gain: five of them are made."""
DRAWN = 2

_NODE = re.compile(r"  (%\d+) = (?!operand )([^(]+\((%\d+)?.*) : (.+)")
_SHAPES = tuple(f"{str(operator).removesuffix('.default')}(" for operator in SHAPES)
"""How texts begin of operators that passes drop where they keep a shape."""


@dataclass
class _Kind:
    """Buckets that differ in their rows alone.

    Attributes:
        jobs: by the rows of their buckets, in order.
        made: those that are made, by rows: the smallest, the largest, one between, and those drawn.
        results: of these, as they are there.
    """

    jobs: dict[int, CompileJob]
    made: tuple[int, ...]
    results: dict[int, CompileResult] = field(default_factory=dict)

    @property
    def told(self) -> dict[int, CompileJob]:
        """The jobs of buckets whose graphs follow from those of others."""
        return {rows: job for rows, job in self.jobs.items() if rows not in self.made}


def results(
    plan: Plan,
    jobs: Sequence[CompileJob],
    ready: Sequence[CompileResult],
    workers: int,
    signature: Callable[[Bucket], Signature],
    progress: Progress,
) -> Iterator[CompileResult]:
    """Yields the results of all jobs as they complete; of a kind of many buckets few are made, and those of others follow from them.

    Args:
        ready: of jobs that were run before.
        signature: that of a bucket's graph on one rank, once its result was yielded.

    Raises:
        NpucompileError: as `run_all`.
    """
    kinds = _kinds(plan, jobs)
    owner = {job.bucket: kind for kind in kinds for job in kind.jobs.values()}
    first = [kind.jobs[rows] for kind in kinds for rows in kind.made]
    told = {job.bucket for kind in kinds for job in kind.told.values()}
    there = {result.job.bucket for result in ready}
    made = [*first, *(job for job in jobs if job.bucket not in told and job not in first)]
    unlike: list[CompileJob] = []
    for result in itertools.chain(ready, run_all([job for job in made if job.bucket not in there], workers)):
        yield result
        kind = owner.get(result.job.bucket)
        if kind is None or result.job not in first:
            continue
        kind.results[_rows(result.job)] = result
        if len(kind.results) < len(kind.made):
            continue
        try:
            form = _form(plan, kind)
        except LoweringError as error:
            progress.say(f"{result.job.bucket.kind} buckets are made one by one: {error}")
            unlike += kind.told.values()
            continue
        for rows, job in kind.told.items():
            known = form.least <= rows <= form.most
            if known and (followed := _follows(plan, job, form, signature(result.job.bucket))):
                yield followed
            else:
                unlike.append(job)
    yield from run_all(unlike, workers) if unlike else ()


def _kinds(plan: Plan, jobs: Sequence[CompileJob]) -> list[_Kind]:
    """The kinds that have many buckets to make."""
    # Of inputs that only some rows have there are as many as limits say, or as rows where these are fewer.
    least = max(plan.limits.bitmasks, plan.limits.logit_adjustments)
    readable = backend(plan.backend).readable
    new = [job for job in jobs if readable and not job.known_key and job.bucket.batch >= least]
    # Rows that the ranks of a group do not divide evenly are padded, by other operators or other numbers of rows.
    ranks = plan.mesh.axis("tp")

    def alike(job: CompileJob) -> tuple[str, int, int]:
        return job.bucket.kind, job.bucket.q_len, _rows(job) % ranks

    found = []
    for _, same in itertools.groupby(sorted(new, key=lambda job: (alike(job), _rows(job))), alike):
        known = {_rows(job): job for job in same}
        rows = list(known)
        if len(rows) >= LEAST:
            tell = (rows[0], rows[len(rows) // 2], rows[-1])
            # Others with every change of the sources, so that in time all are drawn.
            rest = [each for each in rows if each not in tell]
            drawn = random.Random(repr(backend(plan.backend).options(0))).sample(rest, DRAWN)
            found.append(_Kind(known, (*tell, *drawn)))
    return found


def _rows(job: CompileJob) -> int:
    assert isinstance(job.bucket, Bucket)
    return job.bucket.batch


@dataclass(frozen=True)
class _Form:
    """What the graphs of a kind have in common.

    Attributes:
        tree: of `between`: the record of a bucket, its texts, its opened executable and its census.
        redundant: `_redundant` of each.
        least, most: rows of the smallest and the largest that it was seen in.
    """

    tree: Form
    redundant: int
    least: int
    most: int


def _form(plan: Plan, kind: _Kind) -> _Form:
    """What the graphs of a kind have in common.

    Raises:
        LoweringError: they differ in more than numbers that grow with rows, or a graph that was made is another.
    """
    trees = {rows: _tree(plan, kind.results[rows]) for rows in sorted(kind.made)}
    farthest = sorted(itertools.combinations(trees, 3), key=lambda tell: tell[0] - tell[2])
    for tell in farthest:
        try:
            form = _Form(between([trees[rows] for rows in tell], tell), _redundant(trees[tell[0]][1]), tell[0], tell[2])
            break
        except LoweringError as error:
            if tell is farthest[-1]:
                raise error
    for rows in set(trees) - set(tell):
        follows, result = _derived(plan, form, rows), kind.results[rows]
        if follows and follows != (result.staged, result.compiled):
            raise LoweringError(f"{result.job.bucket.name} is another graph than what follows for it from {', '.join(map(str, tell))} rows")
    return form


def _tree(plan: Plan, result: CompileResult) -> tuple[StagedRecord, dict[str, str], Any, dict[str, int]]:
    staged, compiled = result.staged, result.compiled
    assert staged is not None
    assert compiled is not None
    opened = backend(plan.backend).opened(compiled.data)
    return replace(staged, key="", texts=b""), unpack_texts(staged.texts), opened, dict(compiled.census)


def _redundant(texts: Mapping[str, str]) -> int:
    """Nodes that compute what an earlier one computes, or give their operand as it is."""
    redundant = 0
    for text in texts.values():
        types, known = dict[str, str](), set[str]()
        for line in text.splitlines():
            if not line:
                types, known = {}, set()
            if (node := _NODE.fullmatch(line)) is None:
                continue
            name, computed, operand, kind = node.groups()
            redundant += computed in known or (computed.startswith(_SHAPES) and types.get(operand) == kind)
            types[name] = kind
            known.add(computed)
    return redundant


def _derived(plan: Plan, form: _Form, rows: int) -> tuple[StagedRecord, CompiledFile] | None:
    """What follows for a bucket; None where numbers would be none, or passes would have made less of it."""
    try:
        staged, texts, opened, census = form.tree(rows)
    except LoweringError:
        return None
    if _redundant(texts) != form.redundant:
        return None
    key = graph_key_of(plan, texts["lowered"])
    return replace(staged, key=key, texts=pack_texts(texts)), CompiledFile(backend(plan.backend).closed(opened), census)


def _follows(plan: Plan, job: CompileJob, form: _Form, signature: Signature) -> CompileResult | None:
    """The result of a job that is not run, its executable proved like others. None where it is to be run, and then says what is wrong."""
    began = time.monotonic()
    with rewriting(), contextlib.suppress(LoweringError):
        if follows := _derived(plan, form, _rows(job)):
            staged, compiled = follows
            claims = Claims(replace(signature, inputs=staged.inputs, outputs=staged.outputs), staged.collectives)
            backend(plan.backend).prove(compiled, claims, plan.platform)
            return CompileResult(job, staged, compiled, time.monotonic() - began)
    return None
