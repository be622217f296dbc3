"""A small checkpoint with a tower and a draft head, quantised as published ones are, and served with pictures by emulated devices.

The oracle is the same quantised checkpoint on one device, eager, in one pass and without drafts (`support/served.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import device_families, oracle, served, tiny, towers
from support import toy_device as toy
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.models import registry
from npucompile.models.quant.description import DESCRIPTION
from npucompile.runtime.engine import Engine
from npucompile.runtime.picture_spans import PictureInput
from npucompile.runtime.request import Request, Sampling
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from npucompile.tools.notation import EncodeSize, PrefillSize
from npucompile.tools.quantize.driver import QuantizeSettings, quantize
from npucompile.tools.ranks.offline import OfflineCompletion, complete

NAME, TOKENS, MIXED = "width 72", 10, 4
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
SIZES: dict[str, Any] = {
    "buckets": (4,), "prefill": (32, PrefillSize(16, 2)), "encode": (EncodeSize(24, 2), EncodeSize(160)), "max_model_len": 256,
    "max_num_seqs": 4, "num_speculative_tokens": 2,
}  # fmt: skip
PARTS: dict[str, list[int | tuple[int, int]]] = {
    "one picture": [3, (4, 6), 5],
    "three between text": [2, (4, 4), 3, (6, 10), 1, (2, 4), 4],
    "one over two chunks": [6, (10, 16), 3],
    "none": [9],
    "first and last": [(2, 2), 6, (4, 6), 1],
}


@dataclass(frozen=True)
class Case:
    """How it is served; what is int4 has a tower of int8, as in ModelSlim's recipe of the 397B."""

    mesh: str
    scheme: str
    backend: str


CASES = {
    "one device": Case("", "w8a8", "ge"),
    "one device, captured": Case("", "w4a8", "aclgraph"),
    "two ranks of a group": Case("tp=2", "w4a8", "ge"),
    "two groups": Case("dp=2", "w8a8", "aclgraph"),
    "two groups of two": Case("dp=2,tp=2", "w4a8", "ge"),
}

pytestmark = pytest.mark.usefixtures("threads")


def checkpoint(home: Path, scheme: str) -> Path:
    """A quantised checkpoint with a tower of transformers, every parameter drawn, whose pictures decide tokens far behind them."""
    floats = tiny.write_checkpoint(home / "float", seed=11, agreeing=1, **device_families.HYBRID, rope_parameters=ROTARY)
    weights, text = load_file(floats / "model.safetensors"), json.loads((floats / "config.json").read_text())
    # What a token reads of those before it weighs more, beside the token itself, which decides most of the next one.
    for name in [name for name in weights if name.startswith("model.layers.") and name.endswith((".o_proj.weight", ".out_proj.weight"))]:
        weights[name] *= MIXED
    fields = {"in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, **towers.TOWERS[NAME]}
    fields |= {"out_hidden_size": text["hidden_size"], "hidden_act": "gelu_pytorch_tanh"}
    tower = Qwen3_5VisionModel(Qwen3_5VisionConfig(**fields))
    with torch.no_grad():
        oracle.draw(tower, 36)
    weights |= {f"model.visual.{name}": tensor for name, tensor in tower.state_dict().items()}
    save_file(weights, floats / "model.safetensors", {"format": "pt"})
    described = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], **towers.IDS}
    (floats / "config.json").write_text(json.dumps({**described, "text_config": text, "vision_config": fields}))
    quantize(registry.find(floats), home / "quantised", QuantizeSettings(scheme), tiny.QUIET)
    types = json.loads((home / "quantised" / DESCRIPTION).read_text())
    assert f"{scheme.upper()}_DYNAMIC" in types.values()
    return home / "quantised" if scheme == "w8a8" else towers.in_int8(home / "quantised", types)


def shown(prompt: towers.Prompt) -> tuple[PictureInput, ...]:
    """A prompt's pictures."""
    pixels, pictures, behind = towers.as_bytes(prompt.pixels).numpy(), [], 0
    for (_, h, w), span in zip(prompt.grids, prompt.spans, strict=True):
        own, behind = pixels[behind : behind + h * w], behind + h * w
        pictures.append(PictureInput(span, np.ascontiguousarray(own), (h, w), own.tobytes()[:64] + bytes([h, w])))
    return tuple(pictures)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_it_serves_pictures_as_one_device_computes_them(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    directory = checkpoint(tmp_path, case.scheme)
    plan = tiny.planned_device(directory, mesh=case.mesh, backend=case.backend, **SIZES)
    tiny.built(plan, tmp_path / "artifact")
    artifact = Artifact.open(tmp_path / "artifact")
    tower = {leaf.aval.dtype for leaf in artifact.manifest.params if leaf.name.startswith("params.vision.")}
    assert (torch.int8 in tower) == (case.scheme == "w4a8"), tower
    made = [towers.prompt(NAME, parts, seed) for seed, parts in enumerate(PARTS.values())]
    prompts, pictures = [prompt.tokens for prompt in made], [shown(prompt) for prompt in made]

    def served_by(executor: Any, these: Sequence[int], **options: Any) -> list[OfflineCompletion]:
        asked, seen = [prompts[i] for i in these], [pictures[i] for i in these]
        return complete(executor, asked, Sampling(), TOKENS, frozenset(), pictures=seen, **options)

    every = range(len(prompts))
    with served.emulated(artifact, tmp_path / "cache") as executor:
        assert executor.run_ahead == 1
        assert set(executor.backends.values()) == {case.backend}
        drafted = served_by(executor, every)
        plain = served_by(executor, every, speculative_tokens=0)
        alone = [completion for i in every for completion in served_by(executor, [i])]
        assert executor.compiles() == 0
    assert [completion.record.encoded_pictures for completion in drafted] == [len(each) for each in pictures]
    assert sum(sum(completion.record.accepted_per_position) for completion in drafted) > 0, "drafts are right now and then"
    checked = served.Checked(directory, "none", plan.model.config.variant.shards)
    for ours, others in ((drafted, plain), (plain, alone)):
        checked.check(prompts, ours, others, pictures)
    assert checked.decided >= 20
    for prompt, own, completion in zip(prompts[:3], pictures, plain, strict=False):
        others = [replace(picture, patches=255 - picture.patches) for picture in own]
        assert served.compare(directory, "none", prompt, completion.token_ids, checked.shards, others).wrong, "pictures decide tokens"


@pytest.mark.long
def test_a_prompt_begins_after_pages_that_hold_a_picture(tmp_path: Path) -> None:
    """Its own picture and all before it are known; positions behind it are those that it would have had without."""
    directory = checkpoint(tmp_path, "w8a8")
    tiny.built(tiny.planned_device(directory, mesh="", backend="ge", **SIZES, checkpoint_slots=4), tmp_path / "artifact")
    artifact = Artifact.open(tmp_path / "artifact")
    prompt = towers.prompt(NAME, [6, (10, 16), 90, (4, 4), 3], 7)
    with served.emulated(artifact, tmp_path / "cache") as executor:
        engine, sinks = Engine(executor, refresh_every_s=None, prefix_cache=PrefixCacheSettings()), list[toy.Collector]()
        for name in ("cold", "warm"):
            sinks.append(toy.Collector())
            engine.submit(Request(name, tuple(prompt.tokens), TOKENS, pictures=shown(prompt)), sinks[-1])
            while engine.step():
                engine.stepper.check()
    assert [(sink.end.record.cached_tokens, sink.end.record.encoded_pictures) for sink in sinks] == [(0, 2), (128, 0)]
    for sink in sinks:
        agreement = served.compare(directory, "none", prompt.tokens, sink.tokens, (), shown(prompt))
        assert not agreement.wrong
        assert any(agreement.decided)
