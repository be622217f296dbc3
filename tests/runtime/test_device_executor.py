"""runtime/device_executor.py: an artifact on an emulated device computes what the interpreter of its graphs computes, step after step."""

from __future__ import annotations

import functools
import itertools
import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import ranks, tiny, towers
from support.constrained import run

from npucompile.graphs.errors import ArtifactError, LoweringError, SpecError
from npucompile.graphs.types import Bucket, Mesh
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.artifact.shards import load_shard
from npucompile.lowering.ascend.emulator.device import open_device
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.emulator.memory import ND, NZ
from npucompile.lowering.ascend.ge_file import decode
from npucompile.lowering.switches import SWITCHES
from npucompile.runtime.device_executor import AREA_ALIGNMENT, DeviceExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.executor import ExecutorError
from npucompile.runtime.request import Request, Sampling
from npucompile.runtime.staging import ALIGNMENT
from npucompile.runtime.step_outputs import NOT_FINITE
from npucompile.runtime.steps.pack import pack
from npucompile.runtime.steps.rows import DecodeRow, PrefillRow
from npucompile.tools.notation import EncodeSize
from npucompile.tools.ranks import offline
from npucompile.tools.ranks.weights import rank_params

PREFILL, ONE, TWO = Bucket("prefill", 1, 4), Bucket("decode", 1, 2), Bucket("decode", 2, 2)
PROMPTS = [[1, 2, 3], [9] * 6, [200, 101]]
NO_STOP = frozenset()


@pytest.fixture(scope="module")
def artifact(npu_artifact):
    return Artifact.open(npu_artifact(""))


def opened(artifact, device=None, changed=lambda params: params, **options):
    """An executor of the artifact on an emulated device, with its parameters changed."""

    def load(wanted):
        return changed(rank_params(artifact, 0, checkpoint=None, wanted=wanted, progress=tiny.QUIET))

    device = device or open_device(0)
    try:
        return DeviceExecutor(artifact, device, load, **options)
    except BaseException:
        device.close()
        raise


@pytest.fixture(scope="module")
def executor(artifact):
    """For tests that read nothing of its pools but what their own requests wrote."""
    with closing(opened(artifact, step_timeout_s=ranks.TIMEOUT_S)) as executor:
        yield executor


class Interpreted:
    """The graphs of an artifact on host tensors, over one state."""

    def __init__(self, artifact):
        manifest, params = artifact.manifest, load_shard(artifact)
        self.entries = {entry.bucket: entry for entry in manifest.graphs}
        files = {bucket: artifact.path / entry.compiled.file for bucket, entry in self.entries.items()}
        self.graphs = {bucket: Interpreter(decode(file.read_bytes()), Mesh.parse("")) for bucket, file in files.items()}
        self.params = [params[leaf.name] for leaf in manifest.params]
        self.state = [torch.zeros(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in manifest.state]

    def step(self, bucket, inputs):
        inputs = {**inputs, "coords": np.zeros(2, np.int32)}
        entry = self.entries[bucket]
        operands = [torch.from_numpy(inputs[leaf.path]) for leaf in entry.inputs]
        (results,) = self.graphs[bucket]([[*self.params, *self.state, *operands]])
        return {leaf.path: value.numpy() for leaf, value in zip(entry.outputs, results, strict=True)}


def steps(executor):
    """Two requests: a prompt in two chunks and a short one, then steps of both, of one, of both."""
    limits = executor.limits
    pages = [list(range(1 + i * limits.pages_per_request, 1 + (i + 1) * limits.pages_per_request)) for i in range(2)]
    slots = [[1, 2], [3, 4]]
    sampled = Sampling(temperature=0.8, top_k=20)

    def decode(request, base):
        options = {"sampling": sampled, "uniforms": (0.3, 0.6, 0.9), "logprobs": True} if request else {}
        return DecodeRow(request + 1, base, pages[request], slots[request], 1, **options)

    plan = [
        (PREFILL, [PrefillRow([5, 6, 7, 8], 0, pages[0], 1, 1, 9)]),
        (PREFILL, [PrefillRow([9, 10], 4, pages[0], 1, 1)]),
        (PREFILL, [PrefillRow([250], 0, pages[1], 3, 2, logprobs=True)]),
        (ONE, [decode(0, 6)]),
        (TWO, [decode(1, 1), decode(0, 7)]),
        (TWO, [decode(0, 8), decode(1, 2)]),
        (ONE, [decode(1, 3)]),
        (TWO, [decode(1, 4)]),
        (ONE, [decode(0, 9)]),
    ]
    return [(bucket, pack(bucket, rows, limits, max_logprobs=executor.max_logprobs)) for bucket, rows in plan]


@pytest.mark.parametrize("ahead", [0, 1])
def test_every_output_and_the_state_are_what_the_interpreter_computes(artifact, ahead):
    """Results are read `ahead` steps late, as the engine does; buckets change over the same state."""
    with closing(opened(artifact, step_timeout_s=ranks.TIMEOUT_S)) as executor:
        check_steps(artifact, executor, ahead)


def check_steps(artifact, executor, ahead):
    interpreted, pending, accepted = Interpreted(artifact), [], []

    def read():
        expected, step = pending.pop(0)
        (outputs,) = step.result()
        assert outputs.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(outputs[name], value, err_msg=name)
        accepted.extend(outputs.get("counts", np.zeros(0)).tolist())

    for bucket, inputs in steps(executor):
        step = executor.launch(bucket, [inputs])
        pending.append((interpreted.step(bucket, inputs), step))
        while len(pending) > ahead:
            read()
    while pending:
        read()
    first = len(artifact.manifest.params)
    for leaf, mine, theirs in zip(artifact.manifest.state, executor._operands[ONE][first:], interpreted.state, strict=False):
        # Page and slot 0, which padding writes to, may hold NaN.
        np.testing.assert_array_equal(mine.cpu().float().numpy(), theirs.float().numpy(), err_msg=leaf.name)
    assert {1, 2} <= set(accepted), "no draft was accepted, or none rejected"


def generated(executor, monkeypatch, run_ahead, drafts, count=12):
    monkeypatch.setattr(offline, "Engine", functools.partial(Engine, run_ahead=run_ahead))
    return offline.complete(executor, PROMPTS, Sampling(), count, NO_STOP, speculative_tokens=drafts)


def test_neither_running_ahead_nor_drafts_change_a_greedy_token(executor, monkeypatch):
    outcomes = {(ahead, k): generated(executor, monkeypatch, ahead, k) for ahead in (0, 1) for k in (0, 1)}
    expected = [completion.token_ids for completion in outcomes[0, 0]]
    assert len(set(expected)) == len(PROMPTS)
    assert all([completion.token_ids for completion in outcome] == expected for outcome in outcomes.values())
    assert all(sum(c.record.accepted_per_position) for c in (outcomes[0, 1][0], outcomes[1, 1][0]))
    assert executor.compiles() == 0
    assert executor.refresh() is False
    assert executor.backends == {bucket.name: "ge" for bucket in (PREFILL, ONE, TWO)}


def test_switches_that_are_off_change_no_token(artifact, executor, monkeypatch):
    def formats(executor):
        return {operand.allocation.format for bucket in executor.buckets for operand in executor._operands[bucket] if operand is not None}

    with closing(opened(artifact, off=frozenset(SWITCHES), step_timeout_s=ranks.TIMEOUT_S)) as plain:
        assert (plain.run_ahead, executor.run_ahead) == (0, 1)
        assert (formats(plain), formats(executor)) == ({ND}, {ND, NZ})
        assert plain._executables[ONE].ge_file.options["ge.jit_compile"] == "0"
        tokens = [[c.token_ids for c in generated(each, monkeypatch, None, None)] for each in (plain, executor)]
    assert tokens[0] == tokens[1]


def outcomes(artifact, cache):
    reports = []
    with closing(
        opened(
            artifact, cache_dir=cache, report=lambda bucket, seconds, outcome: outcome and reports.append((bucket, seconds >= 0, outcome))
        )
    ):
        return reports


def test_a_second_start_compiles_nothing(artifact, tmp_path):
    assert outcomes(artifact, tmp_path) == [(bucket, True, "compiled") for bucket in (TWO, PREFILL, ONE)]
    assert outcomes(artifact, tmp_path) == [(bucket, True, "cached") for bucket in (TWO, PREFILL, ONE)]


class Refusing:
    """An emulated device whose compiler refuses the graphs of some buckets."""

    def __init__(self, artifact, *buckets):
        self.device = open_device(0)
        self.refused = {artifact.path / entry.compiled.file for entry in artifact.manifest.graphs if entry.bucket in buckets}

    def __getattr__(self, name):
        return getattr(self.device, name)

    def open(self, path, rank, communicators):
        executable = self.device.open(path, rank, communicators)
        if path in self.refused:
            executable._graph.compile = self.compile
        return executable

    def compile(self):
        raise RuntimeError("E89999: no tiling")


def test_a_bucket_that_cannot_be_compiled_runs_in_larger_ones(artifact, executor, monkeypatch, caplog):
    expected = [completion.token_ids for completion in generated(executor, monkeypatch, 1, 1)]
    reports = []
    with closing(opened(artifact, Refusing(artifact, ONE), report=lambda *report: reports.append(report))) as degraded:
        assert degraded.missing == {ONE: "compiling the graph with GE failed: E89999: no tiling"}
        assert [(bucket, outcome) for bucket, _, outcome in reports if outcome] == [
            (TWO, "compiled"),
            (PREFILL, "compiled"),
            (ONE, degraded.missing[ONE]),
        ]
        assert degraded.buckets == (TWO, PREFILL)
        assert "decode-b1-q2 cannot be compiled" in caplog.text
        with pytest.raises(SpecError, match=r"no bucket decode-b1-q2; the artifact has decode-b2-q2, prefill-b1-q4"):
            degraded.launch(ONE, [{}])
        completions = generated(degraded, monkeypatch, 1, 1)
        assert [completion.token_ids for completion in completions] == expected
        assert {name for completion in completions for name, _ in completion.record.decode_steps} == {TWO.name}


def test_what_is_left_must_serve(artifact):
    reasons = "decode-b1-q2: compiling the graph with GE failed: E89999: no tiling; decode-b2-q2: compiling the graph"
    with pytest.raises(LoweringError, match=f"no decode bucket can run, and serving needs at least one: {reasons}"):
        opened(artifact, Refusing(artifact, ONE, TWO))


def test_a_step_that_hangs_is_reported_with_what_the_device_runs(artifact):
    release = threading.Event()
    device = open_device(0)
    with closing(opened(artifact, device, step_timeout_s=0.2)) as executor:
        device._state.stream.launch("a job that hangs", release.wait)
        bucket, inputs = steps(executor)[0]
        step, _ = (executor.launch(bucket, [inputs]) for _ in range(2))
        with pytest.raises(ExecutorError, match=r"emulated:0 has not come to this event in 0\.2 s: it runs a job that hangs"):
            step.result()
        with pytest.raises(ExecutorError, match=r"it runs a job that hangs"):
            executor.launch(bucket, [inputs])
        release.set()


def test_an_artifact_for_another_device_is_refused(tiny_artifact):
    with pytest.raises(ArtifactError, match=r"prefill-b1-q4 has no executable for emulated:0; legal is an artifact built for it"):
        opened(Artifact.open(tiny_artifact))


def test_what_is_no_number_fails_its_request_alone(artifact):
    """On a device that returns no logits: one token's embedding is spoilt, and a request gets to it by its prompt."""

    def spoilt(params):
        for name, value in params:
            if name == "params.embed":
                value[9] = float("nan")
            yield name, value

    requests = [Request(str(i), tuple(prompt), 5) for i, prompt in enumerate(PROMPTS)]
    with closing(opened(artifact)) as executor:
        want = [outcome.tokens for outcome in run(executor, [requests[0], requests[2]])]
    with closing(opened(artifact, changed=spoilt)) as executor:
        first, failed, last = run(executor, requests)
    assert [first.tokens, last.tokens] == want
    assert (failed.tokens, failed.end.reason, failed.end.message) == ([], "error", NOT_FINITE)


def test_all_pools_lie_in_one_area_that_links_can_reach(executor):
    (area,) = executor.areas
    assert area.address % AREA_ALIGNMENT == area.nbytes % AREA_ALIGNMENT == 0
    ends = [(pool.data_ptr(), pool.data_ptr() + pool.nbytes) for pool in executor.state.values()]
    assert all(first % ALIGNMENT == 0 for first, _ in ends)
    assert area.address == min(ends)[0]
    assert max(last for _, last in ends) <= area.address + area.nbytes
    assert all(last <= following for (_, last), (following, _) in itertools.pairwise(sorted(ends)))
    assert {region.address for region in executor.regions} < {first for first, _ in ends}


def test_logits_are_adjusted_on_the_device(executor):
    """A bias that outweighs all others is the output, beside free requests; drafts change nothing under penalties."""
    free = [Request(str(i), tuple(prompt), 12) for i, prompt in enumerate(PROMPTS)]
    sampling = {
        "bias": Sampling(logit_bias=((7, 100.0),)),
        "penalties": Sampling(frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3),
        "both": Sampling(logit_bias=((7, 2.0), (9, 2.0)), presence_penalty=2.0),
    }
    alone = [outcome.tokens for outcome in run(executor, free)]
    outputs = []
    for drafts in (None, 0):
        asked = [replace(request, id=name, sampling=chosen, speculative_tokens=drafts)
                 for request, (name, chosen) in zip(free, sampling.items(), strict=True)]  # fmt: skip
        outcomes = run(executor, [*asked, *free])
        assert [outcome.tokens for outcome in outcomes[3:]] == alone
        outputs.append([outcome.tokens for outcome in outcomes[:3]])
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == [7] * 12
    assert all(tokens != free for tokens, free in zip(outputs[0], alone, strict=True))


def test_rows_of_pictures_are_encoded_on_the_device(tmp_path):
    """Buckets that read other parameters than the model's are beside those that do, over one pool."""
    name = "width 72"
    options = {"target": "ascend-a3", "mesh": "1", "buckets": (2,), "prefill": (16,), "max_model_len": 128, "encode": (EncodeSize(24),)}
    plan = tiny.planned(towers.saved(name, tmp_path / "tower"), **options, dtype="auto", backend="ge", max_num_seqs=2)
    tiny.built(plan, tmp_path / "out")
    with closing(opened(Artifact.open(tmp_path / "out"))) as executor:
        grids = [(1, 4, 6)]
        pixels = towers.patches(name, grids, 1)
        inputs = {"patches": towers.as_bytes(pixels)[None].numpy(), "grids": np.array([[4, 6]], np.int32)}
        inputs["picture_rows"] = np.arange(3, 9, dtype=np.int32)[None]
        assert executor.launch(Bucket("encode", 1, 24), [inputs]).result()[0]["finite"].tolist() == [1]
        made, wanted = executor.state["state.picture_pool"].cpu()[3:9, 0, 0].float(), towers.rows(name, pixels, grids)
        assert (made - wanted).pow(2).mean().sqrt() < 0.02 * wanted.pow(2).mean().sqrt()
        row = PrefillRow([1, 2, 3], 0, [1], 1, 1)
        tokens = executor.launch(Bucket("prefill", 1, 16), [pack(Bucket("prefill", 1, 16), [row], executor.limits)]).result()[0]["tokens"]
        assert 0 <= tokens[0, 0] < executor.vocab_size
