"""From a checkpoint to served tokens through the device path: every kind of model, mesh and quantisation, on emulated ranks.

The oracle is the checkpoint's own model on one device, in the same quantised form, eager and without drafts. A served token must be the
one that it computes wherever its margin, and that of the experts it chooses, exceed the rounding of bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import served, tiny
from support.toy_device import finished

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.engine import Engine
from npucompile.runtime.request import Request, Sampling
from npucompile.runtime.rng import random_number
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from npucompile.tools.ranks.offline import complete

MODELS, MESHES, SCHEMES = ("dense", "moe", "bundled"), ("tp=2", "dp=2", "dp=2,tp=2"), ("none", "w8a8", "w4a8")
# Each pair of a model, a mesh and a quantisation once.
CASES = [(model, mesh, SCHEMES[(i + j) % 3]) for i, model in enumerate(MODELS) for j, mesh in enumerate(MESHES)]
SIZES = {"buckets": (1, 4), "prefill": (64,), "max_model_len": 256, "max_num_seqs": 4, "num_speculative_tokens": 3}
PROMPTS = [[1, 2, 3], list(range(60, 70)), [7] * 5, list(range(100, 190)), [200]]
FUSED = "npucompile_packages.dispatch_ffn_combine_w4a8.default"
LONG = [[value, *range(40, 160)] for value in (3, 5, 8)]
"""Prompts of 121 tokens: their outputs need a second page."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    return served.checkpoints(tmp_path_factory.mktemp("checkpoints"))


pytestmark = pytest.mark.usefixtures("threads")


@pytest.mark.parametrize(("model", "mesh", "scheme"), CASES)
@pytest.mark.short_cases("dense-dp=2-w8a8")
def test_served_tokens_are_those_of_one_device(checkpoints, tmp_path, model, mesh, scheme):
    plan = tiny.planned_device(checkpoints[model], mesh=mesh, quantization=scheme, **SIZES)
    tiny.built(plan, tmp_path / "artifact")
    artifact, checked = Artifact.open(tmp_path / "artifact"), served.Checked(checkpoints[model], scheme)
    with served.emulated(artifact, tmp_path / "cache") as executor:
        assert executor.run_ahead == 1
        drafted = complete(executor, PROMPTS, Sampling(), 12, frozenset())
        plain = complete(executor, PROMPTS, Sampling(), 12, frozenset(), speculative_tokens=0)
        roomy = complete(executor, LONG, Sampling(), 12, frozenset())
        # Few pages, so that requests take them from each other.
        crowded = complete(tiny.Narrowed(executor, executor.buckets, num_pages=4), LONG, Sampling(), 12, frozenset())
        assert executor.compiles() == 0
    assert sum(completion.record.preemptions for completion in crowded) > 0
    used = {name for completion in drafted for name, _ in completion.record.decode_steps}
    assert len(used) == 2, "both decode buckets are used"
    checked.check(PROMPTS, drafted, plain)
    checked.check(LONG, roomy, crowded)
    assert checked.decided >= 20


@pytest.mark.long
def test_both_backends_for_npus_serve_what_one_device_does(checkpoints, tmp_path):
    """From CANN 9.0 on captured graphs take another operator in prefill, so both are compared with one device instead of each other."""
    for backend, packages in (("ge", ()), ("aclgraph", ()), ("aclgraph", ("vllm-ascend",))):
        options = {"mesh": "dp=2,tp=2", "quantization": "w8a8", "backend": backend, "operator_packages": packages}
        home = tmp_path / "-".join((backend, *packages))
        tiny.built(tiny.planned_device(checkpoints["moe"], **options, **SIZES), home)
        artifact, checked = Artifact.open(home), served.Checked(checkpoints["moe"], "w8a8")
        with served.emulated(artifact, tmp_path / "cache") as executor:
            assert set(executor.backends.values()) == {backend}
            assert executor.run_ahead == 1
            drafted = complete(executor, PROMPTS, Sampling(), 12, frozenset())
            long = complete(executor, LONG, Sampling(), 12, frozenset())
            assert executor.compiles() == 0
        checked.check(PROMPTS, drafted, drafted)
        checked.check(LONG, long, long)
        assert checked.decided >= 10


@pytest.mark.long
def test_fused_experts_of_a_package_serve_what_one_device_does(checkpoints, tmp_path):
    """In prefill and in the larger decode bucket; the smaller has fewer tokens than a device has matrix cores, and dispatches."""
    packages = ("sgl-kernel-npu", "vllm-ascend")
    sizes = SIZES | {"buckets": (1, 12), "max_num_seqs": 12, "backend": "aclgraph", "operator_packages": packages}
    plan = tiny.planned_device(checkpoints["moe"], mesh="dp=2,tp=2", quantization="w4a8", **sizes)
    tiny.built(plan, tmp_path / "artifact")
    artifact, checked = Artifact.open(tmp_path / "artifact"), served.Checked(checkpoints["moe"], "w4a8")
    fused = {entry.bucket.name for entry in artifact.manifest.graphs if FUSED in entry.census}
    assert fused == {"decode-b12-q4", "prefill-b1-q64"}
    assert {"dispatch", "fused_experts"} <= set(artifact.manifest.communicator_bytes)
    with served.emulated(artifact, tmp_path / "cache") as executor:
        completed = complete(executor, PROMPTS, Sampling(), 12, frozenset())
        alone = complete(executor, PROMPTS[:1], Sampling(), 12, frozenset())
        assert executor.compiles() == 0
    used = {name for completion in (*completed, *alone) for name, _ in completion.record.decode_steps}
    assert used == {"decode-b1-q4", "decode-b12-q4"}
    checked.check(PROMPTS, completed, completed)
    checked.check(PROMPTS[:1], alone, alone)
    assert checked.decided >= 10


@pytest.mark.long
def test_top_p_alone_samples_what_the_cpu_samples(checkpoints, tmp_path):
    """NPUs rank 1,024 of the 2,048 tokens, of which `top_p` keeps fewer. A token is compared where the rounding of bfloat16 does not
    decide it: the CPU's logits, rounded or not, and random numbers around its own give one token."""
    tiny.built(tiny.planned_device(checkpoints["bundled"], mesh="tp=2", **SIZES), tmp_path / "artifact")
    prompts, near = PROMPTS[:4], (-0.03, 0.0, 0.03)
    with served.emulated(Artifact.open(tmp_path / "artifact"), tmp_path / "cache") as executor:
        runs = {seed: complete(executor, prompts, Sampling(0.8, top_p=0.9, seed=seed), 8, frozenset()) for seed in (1, 2)}
    decided = 0
    for seed, prompt, completion in ((seed, *pair) for seed, run in runs.items() for pair in zip(prompts, run, strict=True)):
        uniform = torch.tensor([random_number(seed, i) for i in range(len(completion.token_ids))])
        drawn = [
            served.sampled(logits, (uniform + shift).clamp(0, 1 - 2**-20), temperature=0.8, top_p=0.9)
            for logits in served.logits_of(checkpoints["bundled"], "none", prompt, completion.token_ids)
            for shift in near
        ]
        for i, token in enumerate(completion.token_ids):
            choices = {int(tokens[i]) for tokens in drawn}
            assert len(choices) > 1 or choices == {token}, (seed, prompt, i, token, choices)
            decided += len(choices) == 1
    assert decided >= 20
    assert all(a.token_ids != b.token_ids for a, b in zip(*runs.values(), strict=True)), "a seed decides"


@pytest.mark.long
def test_a_prompt_begins_after_pages_and_a_state_that_an_earlier_one_left(checkpoints, tmp_path):
    """A hybrid model on two emulated ranks: pages and slots hold on a device what they hold here, and drafts are verified after a hit."""
    sizes = {**SIZES, "buckets": (1,), "max_model_len": 512, "checkpoint_slots": 4}
    tiny.built(tiny.planned_device(checkpoints["bundled"], mesh="tp=2", **sizes), tmp_path / "artifact")
    artifact = Artifact.open(tmp_path / "artifact")
    shared = [(7 * i) % 250 for i in range(130)]
    prompts = [[*shared, 3, 5], [*shared, 9, 8, 7]]
    with served.emulated(artifact, tmp_path / "cache") as executor:
        assert executor.recurrent
        cold = complete(executor, prompts, Sampling(), 8, frozenset())
        engine = Engine(executor, refresh_every_s=None, prefix_cache=PrefixCacheSettings())
        (warm,) = zip(*(finished(engine, [Request(str(i), tuple(prompt), 8)]) for i, prompt in enumerate(prompts)), strict=True)
    assert [sink.tokens for sink in warm] == [list(completion.token_ids) for completion in cold]
    assert [sink.end.record.cached_tokens for sink in warm] == [0, 128]
