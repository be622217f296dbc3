"""tools/agreement/sized.py: executables that take any size are compared at the sizes at which they serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support import tiny

from npucompile.graphs.errors import VerifyError
from npucompile.graphs.steps.table import StepInputs, kind_of
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.backend import open_executable
from npucompile.runtime.steps.resized import resized
from npucompile.tools.agreement import alone, executables
from npucompile.tools.agreement.sized import signature_of
from npucompile.tools.notation import PrefillSize


class AnySize:
    """Takes any rows and tokens a row, and runs each row alone in the eager graph of one row; `error` is added where there are several.

    Attributes:
        spoiled: of log probabilities which places along a chunk are off, by its length.
    """

    backend = "stub"

    def __init__(self, artifact: Artifact, bucket: Bucket) -> None:
        manifest = artifact.manifest
        entry = next(entry for entry in manifest.graphs if entry.bucket == replace(bucket, batch=1))
        self.eager, self.limits = open_executable(artifact.path / entry.reference, "eager"), manifest.limits
        self.bucket, self.names = entry.bucket, [leaf.path for leaf in entry.inputs]
        self.sizes: list[tuple[int, ...]] = []
        self.error, self.outputs = 0.0, [leaf.path for leaf in entry.outputs]
        self.spoiled: Callable[[int], slice] = lambda count: slice(0)

    def __call__(self, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        shared = operands[: -len(self.names)]
        inputs = {name: operand.numpy() for name, operand in zip(self.names, operands[len(shared) :], strict=True)}
        self.sizes.append((len(inputs["request_slots"]), inputs["tokens"].shape[1] if "tokens" in inputs else self.bucket.q_len))
        rows = []
        for row in range(self.sizes[-1][0]):
            own = resized(inputs, [row], StepInputs(self.bucket, self.limits, "logprobs" in inputs))
            rows.append(self.eager([*shared, *(torch.from_numpy(own[name]) for name in self.names)]))
        results = [torch.cat(of) for of in zip(*rows, strict=True)]
        if wide := kind_of(self.bucket).wide:
            results = [of[:, : self.sizes[-1][1]] if name in wide else of for name, of in zip(self.outputs, results, strict=True)]
            for row, count in enumerate(inputs["query_lens"].tolist()):
                results[self.outputs.index("chosen_logprobs")][row, self.spoiled(count)] += 0.01
        return [result + self.error if result.is_floating_point() and len(rows) > 1 else result for result in results]


def compiled(directory, names, monkeypatch, any_size=True):
    """An artifact of which some buckets have executables that take any size, and these by name."""
    tiny.with_compiled(directory, "stub", names)
    artifact = tiny.published(
        directory,
        lambda manifest, _: replace(
            manifest, graphs=tuple(replace(entry, any_size=any_size and entry.bucket.name in names) for entry in manifest.graphs)
        ),
    )
    opened = {entry.compiled.file: AnySize(artifact, entry.bucket) for entry in artifact.manifest.graphs if entry.compiled}
    monkeypatch.setattr(
        executables, "open_executable", lambda path, name: opened[f"graphs/{path.name}"] if name == "stub" else open_executable(path, name)
    )
    by_name = {entry.bucket.name: opened[entry.compiled.file] for entry in artifact.manifest.graphs if entry.compiled}
    return artifact, by_name


@pytest.fixture
def taking_any(own_artifact, monkeypatch):
    return compiled(own_artifact, ("prefill-b1-q4", "prefill-b1-q16", "decode-b2-q4", "decode-b4-q4"), monkeypatch)


@pytest.mark.parametrize("any_size", [False, True])
@pytest.mark.parametrize("name", ["score-b1-q8", "score-b3-q8"])
def test_outputs_as_wide_as_a_chunk_are_compared_where_a_row_has_tokens(tmp_path, tiny_checkpoint, monkeypatch, name, any_size):
    sizes = {"buckets": (1,), "prefill": (4,), "score": (8, PrefillSize(8, 3)), "num_speculative_tokens": 0, "max_num_seqs": 4}
    tiny.built(tiny.planned(tiny_checkpoint, **sizes), tmp_path / "out")
    artifact, opened = compiled(tmp_path / "out", (name,), monkeypatch, any_size)
    entry = next(entry for entry in artifact.manifest.graphs if entry.bucket.name == name)
    opened[name].spoiled = lambda count: slice(count, None)
    assert executables.Proof(artifact).entry(artifact, entry)["logits_error"] <= 1e-5
    for place in (slice(0, 1), slice(-1, None)):
        opened[name].spoiled = lambda count, place=place: slice(*place.indices(count))
        with pytest.raises(VerifyError, match=rf"^{name} \(stub\) against eager rows run alone: logits differ by"):
            executables.Proof(artifact).entry(artifact, entry)


def test_they_run_without_padding_and_with_several_prompts(taking_any):
    artifact, opened = taking_any
    measured = executables.verify(artifact, tiny.QUIET)
    # With 1 and 2 live rows, twice, and once as it is; the next larger bucket with those that are more.
    assert sorted(opened["decode-b2-q4"].sizes) == [(1, 4), (1, 4), (2, 4), (2, 4), (2, 4)]
    assert sorted(opened["decode-b4-q4"].sizes) == [(3, 4), (3, 4), (4, 4), (4, 4)]
    assert measured["decode-b4-q4"]["rows"] == 14
    assert [rows for rows, _ in opened["prefill-b1-q4"].sizes] == [1, 1, 1, 4]
    sizes = opened["prefill-b1-q16"].sizes
    assert [rows for rows, _ in sizes] == [1, 1, 1, 4]
    assert measured["prefill-b1-q16"]["rows"] == 3 + 4


def test_short_prompts_are_run_alone_by_the_narrowest_eager_graph_that_holds_them(taking_any, monkeypatch):
    artifact, _ = taking_any
    entry = next(entry for entry in artifact.manifest.graphs if entry.bucket.name == "prefill-b1-q16")
    widths, run_step = [], alone.run_step

    def noted(executable, case, signature):
        widths.extend(leaf.aval.shape[1] for leaf in signature.inputs if leaf.path == "tokens")
        return run_step(executable, case, signature)

    monkeypatch.setattr(alone, "run_step", noted)
    executables.Proof(artifact).entry(artifact, entry)
    assert widths == [16, 4, 4]


def test_the_first_of_several_rows_alone_proves_its_eager_graph_and_padding(taking_any, monkeypatch):
    artifact, opened = taking_any
    checked = []

    def noted(found, tolerance, what):
        checked.append(what.split(" against")[0])
        return found.measured(tolerance.measure)

    monkeypatch.setattr(executables, "check_tolerance", noted)
    executables.verify(artifact, tiny.QUIET)
    of = {name: [what for what in checked if what.startswith(name)] for name in opened}
    assert of == {
        "prefill-b1-q4": ["prefill-b1-q4 (stub)"],
        "prefill-b1-q16": ["prefill-b1-q16 (stub)"],
        "decode-b2-q4": ["decode-b2-q4 (eager)", "decode-b2-q4 (stub)"],
        "decode-b4-q4": ["decode-b4-q4 (stub)"],
    }


@pytest.mark.parametrize("name", ["decode-b4-q4", "prefill-b1-q16"])
def test_one_whose_rows_depend_on_how_many_there_are_is_named(taking_any, name):
    artifact, opened = taking_any
    opened[name].error = 1e-2
    with pytest.raises(VerifyError, match=rf"^{name} \(stub\) against eager rows run alone: (logits|state) differ by"):
        executables.verify(artifact, tiny.QUIET)


def test_a_signature_at_other_sizes_is_what_the_step_takes(tiny_artifact):
    manifest = Artifact.open(tiny_artifact).manifest
    entry, bucket = next(entry for entry in manifest.graphs if entry.bucket.name == "prefill-b1-q16"), Bucket("prefill", 3, 5)
    sized = signature_of(bucket, manifest.signature(entry), manifest.limits)
    assert {leaf.path: leaf.aval.shape for leaf in sized.inputs} == {
        field.name: shape for field, shape in StepInputs(bucket, manifest.limits, logprobs=True).shapes()
    }
    assert {leaf.aval.shape[0] for leaf in sized.outputs} == {3}
