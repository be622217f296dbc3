"""tools/builder/kinds.py: buckets of a kind share what is compiled; others are compiled for themselves, and the build says so."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny import planned, write_checkpoint

from npucompile.graphs.types import Bucket
from npucompile.lowering.backends.inductor.backend import BACKEND
from npucompile.tools.builder.kinds import Kinds
from npucompile.tools.builder.planned import Plan
from npucompile.tools.builder.stages import stage
from npucompile.tools.progress import Progress


class Said(Progress):
    """Progress that keeps what is said."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    sizes = {"buckets": (1, 2, 9), "prefill": (8, 16)}
    return planned(write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny"), dtype=request.param, backend="inductor", **sizes)


def parts(kinds: Kinds, plan: Plan, *buckets: Bucket) -> list[Any]:
    return [kinds.parts(stage(plan, bucket).lowered) for bucket in buckets]


@pytest.mark.short_cases("bfloat16")
def test_buckets_of_a_kind_have_the_same_parts(plan: Plan) -> None:
    said = Said()
    kinds = Kinds(plan, said)
    decode = parts(kinds, plan, *(bucket for bucket in plan.buckets if bucket.kind == "decode"))
    prefill = parts(kinds, plan, *(bucket for bucket in plan.buckets if bucket.kind == "prefill"))
    assert len(decode) == 3
    assert len(prefill) == 2
    assert all(each == decode[0] for each in decode)
    assert all(each == prefill[0] for each in prefill)
    assert decode[0] != prefill[0]
    assert kinds.any_size == set(plan.buckets)
    assert said.lines == []


@pytest.mark.short_cases("bfloat16")
def test_a_graph_that_is_another_is_compiled_for_itself(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said()
    kinds, lowered = Kinds(plan, said), stage(plan, plan.buckets[-1]).lowered
    monkeypatch.setattr("npucompile.lowering.backends.inductor.backend.InductorKind.holds", lambda kind, other: False)
    assert kinds.parts(lowered) == BACKEND.parts(lowered, threads=0)
    assert said.lines == [f"{lowered.bucket.name} is compiled for itself: its graph differs from others of its kind in more than sizes"]
