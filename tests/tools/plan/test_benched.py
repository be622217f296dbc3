"""tools/plan/benched.py: what an engine with known steps would have measured is predicted from two of its buckets."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
from support.scheduled import live_rows, served

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.scheduler.policy import Policy
from npucompile.tools.bench.step import needed_bytes
from npucompile.tools.plan.benched import compare, engine_of, host_of, read_bench
from npucompile.tools.plan.step_law import ReadRates, StepLaw
from npucompile.tools.plan.system import Workload

PROMPT, OUTPUT = 6, 9
SLOWER, FIXED, PADDED = 1.4, 7e-4, 0.6
BATCHES = (1, 2, 4, 8, 16)
RATES = ReadRates(((1e4, 8e9), (1e6, 5e9), (1e9, 1e9)))


def with_buckets(artifact: Artifact) -> Artifact:
    """The artifact as if it had more decode buckets, whose graphs compute in proportion to their rows."""
    manifest = artifact.manifest
    entry = next(e for e in manifest.graphs if e.bucket.kind == "decode" and e.bucket.batch == 1)
    graphs = [e for e in manifest.graphs if e.bucket.kind == "prefill"]
    for batch in BATCHES:
        bucket = Bucket("decode", batch, entry.bucket.q_len)
        graphs.append(dataclasses.replace(entry, bucket=bucket, cost={name: batch * value for name, value in entry.cost.items()}))
    room = {"num_pages": 1 + 32 * manifest.limits.pages_per_request, "num_slots": 1 + 32 * manifest.limits.slots_per_request}
    manifest = dataclasses.replace(manifest, graphs=tuple(graphs), limits=dataclasses.replace(manifest.limits, **room))
    return Artifact(artifact.path, manifest, artifact.digest)


def host_s(rows: int) -> float:
    return 1e-3 + 1e-4 * rows


def prefill_s(bucket: Bucket) -> float:
    return 4e-3 + 1e-4 * bucket.tokens


def engine_row(artifact: Artifact, law: StepLaw, count: int) -> dict[str, object]:
    """So many requests at once, through the engine."""
    entries = {e.bucket: e for e in artifact.manifest.graphs}
    inner: list[tuple[float, float]] = []

    def step_s(step):
        rows = live_rows(step)
        if step.bucket.kind == "prefill":
            return PADDED * prefill_s(step.bucket) + host_s(rows)
        context = max(row.start for part in step.groups for row in part.rows)
        inner.append((FIXED + SLOWER * law.seconds(entries[step.bucket], rows, context), host_s(rows)))
        return sum(inner[-1])

    run = served(Workload.uniform(PROMPT, OUTPUT, count, count), Policy(artifact.manifest.limits, tuple(entries)), 1, 1, step_s)
    return {
        "streams": count,
        "tokens_per_s": {"median": count * OUTPUT / max(run.end)},
        "first_token_ms": 1e3 * statistics.median(run.first),
        "step_ms": 1e3 * statistics.median(map(sum, inner)),
        "executable_ms": 1e3 * statistics.median(seconds for seconds, _ in inner),
        "host_ms": 1e3 * statistics.median(seconds for _, seconds in inner),
        "acceptance_length": 1.0,
    }


def measured(artifact: Artifact, law: StepLaw, counts: tuple[int, ...]) -> dict[str, list[dict[str, object]]]:
    """What `bench --json` would say of an engine with the real scheduler, these times of executables, and the host's."""
    entries = {e.bucket: e for e in artifact.manifest.graphs}
    decode = [
        {
            "bucket": b.name,
            "context_tokens": context,
            "compiled_ms": {"median": 1e3 * law.seconds(e, b.batch, context)},
            "read_mb": needed_bytes(artifact.manifest, e, context) / 1e6,
            "read_gb_per_s": {"median": RATES.of(needed_bytes(artifact.manifest, e, context)) / 1e9},
        }
        for b, e in entries.items()
        for context in (8, 32)
        if b.kind == "decode"
    ]
    prefill = [
        {"bucket": b.name, "eager_tokens_per_s": 1.0, "compiled_tokens_per_s": b.tokens / prefill_s(b)}
        for b in entries
        if b.kind == "prefill"
    ]
    streams = [engine_row(artifact, law, count) for count in counts]
    decode += [{"place": "memory", "buffer_mb": size / 1e6, "gb_per_s": {"median": rate / 1e9}} for size, rate in RATES.points]
    # Through the websocket nothing is known of steps; prompts that share a prefill step have a table of their own.
    streams.append({"streams": 1, "tokens_per_s": 1.0, "step_ms": None})
    return {"decode": decode, "prefill": [*prefill, {"bucket": prefill[0]["bucket"], "together_ms": 1.0}], "streams": streams}


@pytest.mark.parametrize("factors", [(2e-3, 1e-9, 2.0), (1e-4, 4e-9, 9.0), (8e-3, 0.0, 0.0)])
@pytest.mark.parametrize(("fit_on", "counts"), [((1, 16), (1, 2, 4, 16)), ((2, 8), (1, 5, 16))])
def test_the_scheduler_that_serves_is_predicted_from_two_buckets(own_artifact: Path, factors, fit_on, counts) -> None:
    artifact = with_buckets(Artifact.open(own_artifact))
    law = StepLaw(artifact.manifest, RATES, *factors)
    rows = compare(artifact, measured(artifact, law, counts), fit_on, PROMPT, OUTPUT)
    steps, streams = ([row for row in rows if row.unit == unit] for unit in ("ms", "tok/s"))
    assert (len(steps), len(streams)) == (2 * len(BATCHES), len(counts))
    assert sum(not row.fitted for row in steps) == 6
    assert any(not row.fitted for row in streams)
    assert max(abs(row.error) for row in steps) < 0.005
    assert max(abs(row.error) for row in streams) < 0.03, [(row.what, row.error) for row in streams]


def test_a_bench_of_another_artifact_is_refused(own_artifact: Path) -> None:
    artifact = Artifact.open(own_artifact)
    figures = measured(with_buckets(artifact), StepLaw(artifact.manifest, RATES, 1e-3, 0.0, 0.0), (1,))
    with pytest.raises(SpecError, match=r"was measured and .* has no such bucket"):
        compare(artifact, figures, (1,), PROMPT, OUTPUT)
    whole = with_buckets(artifact)
    with pytest.raises(SpecError, match="the bench measured 1, 2, 4, 8, 16"):
        compare(whole, figures, (1, 99), PROMPT, OUTPUT)
    with pytest.raises(SpecError, match="was not measured; legal is a bench of all its prefill buckets"):
        compare(whole, {**figures, "prefill": []}, (1, 16), PROMPT, OUTPUT)


def test_a_bench_without_streams_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"figures": [{"figure": "decode", "rows": []}]}))
    with pytest.raises(SpecError, match="lacks prefill, streams"):
        read_bench(file)
    file.write_text("[]")
    with pytest.raises(SpecError, match="is not what"):
        read_bench(file)


def test_host_time_is_linear_in_rows():
    assert host_of([])(5) == 0
    assert host_of([(4, 0.002)])(64) == 0.002
    assert host_of([(1, 0.001), (5, 0.003)])(3) == pytest.approx(0.002)


def test_steps_in_an_engine_have_a_fixed_part_and_a_factor():
    assert engine_of([])(0.02) == 0.02
    assert engine_of([(0.01, 0.012)])(0.02) == pytest.approx(0.024)
    assert engine_of([(0.01, 0.015), (0.03, 0.037)])(0.02) == pytest.approx(0.026)
    assert engine_of([(0.02, 0.024), (0.02, 0.026)])(0.01) == pytest.approx(0.0125, rel=0.01)
    # More than in proportion: no part is negative.
    assert engine_of([(0.01, 0.01), (0.03, 0.06)])(0.0) == 0.0
