"""An engine over a built artifact gives the greedy tokens of transformers for prompts with pictures, however they are served."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import eagle, ranks, tiny, towers
from support import toy_device as toy

from npucompile.graphs.errors import RequestError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.models import checkpoint, registry
from npucompile.models.params import initialise
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.picture_spans import PictureInput
from npucompile.runtime.request import Request
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from npucompile.tools.notation import EncodeSize
from npucompile.tools.ranks.launch import lead_ranks
from npucompile.tools.ranks.rank_settings import RankSettings

NAME, TOKENS = "width 72", 10
ENCODE = (EncodeSize(16, 3), EncodeSize(96))


def built(directory: Path, drafts: int, name: str = NAME, **options: Any) -> Artifact:
    """Of a model that transformers made; it has no draft heads, so that one is drawn."""
    model = towers.saved(name, directory / "model")
    if drafts:
        config = json.loads((model / "config.json").read_text())
        config["text_config"]["mtp_num_hidden_layers"] = 1
        (model / "config.json").write_text(json.dumps(config))
        found = registry.find(model).model
        head = {"mtp": found.family.abstract_params(found.config, torch.float32)["mtp"]}
        checkpoint.save(head, initialise(head, torch.Generator().manual_seed(5)), directory / "head")
        (drawn,) = (directory / "head").glob("*.safetensors")
        own = load_file(model / "model.safetensors")
        save_file({**own, **load_file(drawn)}, model / "model.safetensors", {"format": "pt"})
    sizes = {
        "buckets": (1, 4),
        "prefill": (8, 24),
        "encode": ENCODE,
        "max_model_len": 128,
        "num_speculative_tokens": drafts,
        "checkpoint_slots": 8,
    }
    tiny.built(tiny.planned(model, **{**sizes, **options}), directory / "out")
    return Artifact.open(directory / "out")


@pytest.fixture(scope="module", params=[0, 2], ids=["plain", "drafts"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuExecutor:
    return CpuExecutor(built(tmp_path_factory.mktemp("pictures"), request.param))


def asked(name: str, prompt: towers.Prompt, *, stills: bool = False, count: int = TOKENS, **fields: Any) -> Request:
    """A request for what transformers is asked; the frames of its pictures are not those of stills."""
    pixels, pictures, behind = towers.as_bytes(prompt.pixels).numpy(), [], 0
    for (_, h, w), span in zip(prompt.grids, prompt.spans, strict=True):
        own, behind = pixels[behind : behind + h * w], behind + h * w
        patches = own.reshape(h * w, 3, 2, -1)[:, :, 0].reshape(h * w, -1) if stills else own
        pictures.append(PictureInput(span, np.ascontiguousarray(patches), (h, w), bytes(own.tobytes()[:64]) + bytes([h, w])))
    return Request(name, tuple(prompt.tokens[: prompt.count]), count, pictures=tuple(pictures), **fields)


@functools.cache
def expected(parts: tuple[int | tuple[int, int], ...], seed: int, stills: bool = False) -> list[int]:
    """Greedy tokens of transformers."""
    prompt = made(parts, seed, stills)
    for _ in range(TOKENS):
        prompt.tokens.append(int(prompt.logits(NAME)[-1].argmax()))
    return prompt.tokens[prompt.count :]


def made(parts: Sequence[int | tuple[int, int]], seed: int, stills: bool = False) -> towers.Prompt:
    prompt = towers.prompt(NAME, list(parts), seed)
    if stills and prompt.grids:
        by_frame = prompt.pixels.reshape(len(prompt.pixels), 3, 2, -1)
        by_frame[:, :, 1] = by_frame[:, :, 0]
    return prompt


CASES: dict[str, tuple[int | tuple[int, int], ...]] = {
    "one": (3, (4, 6), 5),
    "three of other sizes": (2, (4, 4), 3, (6, 10), 1, (2, 4), 4),
    "over two and three chunks": (5, (8, 12), 2, (8, 10), 3),
    "first and last": ((2, 2), 6, (4, 6), 1),
    "none": (9,),
}


def serve(executor: Any, requests: Sequence[Request], **options: Any) -> tuple[list[toy.Collector], dict[str, Any]]:
    engine = Engine(executor, refresh_every_s=None, **options)
    sinks = toy.finished(engine, requests)
    for manager in engine.stepper.cache_managers:
        assert manager.pictures is not None
        assert manager.pictures.num_pinned == 0
    return sinks, engine.stats()


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_together_and_again(executor: CpuExecutor, run_ahead: int) -> None:
    """Batches of prompts with and without pictures; the second round has all rows and prefixes of the first."""
    tiny.poison(executor)
    requests = [asked(name, made(parts, seed)) for seed, (name, parts) in enumerate(CASES.items())]
    with tiny.Launching(executor) as launching:
        of = launching if run_ahead else executor
        engine = Engine(of, refresh_every_s=None, run_ahead=run_ahead, prefix_cache=PrefixCacheSettings())
        for turn in range(2):
            sinks = toy.finished(engine, requests)
            for seed, (sink, (name, parts)) in enumerate(zip(sinks, CASES.items(), strict=True)):
                assert (sink.tokens, sink.end.message) == (expected(parts, seed), None), (name, turn)
        stats = engine.stats()
    assert stats["encoded_pictures_total"] <= 8 + 2
    assert stats["prefix_cache_hits_total"] > 0
    assert stats["bucket_steps"]["encode-b3-q16"] > 0


def test_stills_have_one_frame(executor: CpuExecutor) -> None:
    parts = CASES["three of other sizes"]
    (sink,), _ = serve(executor, [asked("a", made(parts, 3, stills=True), stills=True)])
    assert sink.tokens == expected(parts, 3, stills=True)


def test_a_request_that_lost_its_pages_goes_on(executor: CpuExecutor) -> None:
    """There are eight pages; two requests begin with four and three of them and grow into the next two."""
    few = tiny.Narrowed(executor, executor.buckets, num_pages=executor.limits.pages_per_request + 1)
    tiny.poison(executor)
    cases = [((3, (4, 6), 45), 1), ((2, (6, 6), 31), 2), ((1, (4, 4), 20), 3)]
    requests = [asked(f"r{seed}", made(parts, seed)) for parts, seed in cases]
    sinks, stats = serve(few, requests)
    for sink, (parts, seed) in zip(sinks, cases, strict=True):
        assert sink.tokens == expected(parts, seed)
    assert stats["preemptions_total"] > 0


def test_groups_with_and_without_pictures_run_encode_steps_together(executor: CpuExecutor) -> None:
    groups = tiny.Groups(executor, CpuExecutor(executor.artifact))
    for each in groups.executors:
        tiny.poison(each)
    requests = [asked(name, made(parts, seed)) for seed, (name, parts) in enumerate(CASES.items())]
    sinks, stats = serve(groups, requests)
    for seed, (sink, (name, parts)) in enumerate(zip(sinks, CASES.items(), strict=True)):
        assert (sink.tokens, sink.end.message) == (expected(parts, seed), None), name
    assert stats["encoded_pictures_total"] == sum(not isinstance(part, int) for parts in CASES.values() for part in parts)


def test_two_pictures_of_equal_size_and_one_twice(executor: CpuExecutor) -> None:
    """With prefixes kept: only what differs is computed again."""
    parts = (3, (4, 6), 70)
    first, other = made(parts, 1), made(parts, 1)
    other.pixels = made(parts, 2).pixels
    twice = made((2, (4, 6), 3, (4, 6), 4), 5)
    twice.pixels = torch.cat([twice.pixels[:24]] * 2)
    tokens = []
    for prompt in (first, other, twice):
        for _ in range(TOKENS):
            prompt.tokens.append(int(prompt.logits(NAME)[-1].argmax()))
        tokens.append(prompt.tokens[prompt.count :])
    engine = Engine(executor, refresh_every_s=None, prefix_cache=PrefixCacheSettings())
    records = []
    for name, place in (("a", 0), ("b", 1), ("c", 0), ("d", 2)):
        (sink,) = toy.finished(engine, [asked(name, (first, other, twice)[place])])
        assert sink.tokens == tokens[place], name
        records.append((sink.end.record.cached_tokens, sink.end.record.encoded_pictures))
    assert [encoded for _, encoded in records] == [1, 1, 0, 1]
    assert [cached for cached, _ in records[:2]] == [0, 0]
    assert records[2][0] >= 16


def test_what_these_graphs_cannot_take_is_refused(executor: CpuExecutor) -> None:
    engine = Engine(executor, refresh_every_s=None)
    with pytest.raises(RequestError, match="picture 0 has 100 patches after resizing; the largest encode bucket holds 96"):
        engine.submit(asked("a", made((1, (10, 10), 2), 1)), toy.Collector())
    assert not engine.step()


def test_ranks_in_processes_of_their_own(tmp_path: Path) -> None:
    """Follower ranks get patches and rows like other inputs, and rank 0 reads whether they are finite."""
    artifact = built(tmp_path, 2, mesh="dp=2")
    requests = [asked(name, made(parts, seed)) for seed, (name, parts) in enumerate(CASES.items())]
    with lead_ranks(artifact, None, RankSettings(threads=1), ranks.environment()) as cluster:
        assert cluster is not None
        sinks, stats = serve(cluster.load_executor(), requests)
    for seed, (sink, (name, parts)) in enumerate(zip(sinks, CASES.items(), strict=True)):
        assert (sink.tokens, sink.end.message) == (expected(parts, seed), None), name
    assert stats["encoded_pictures_total"] == 8


LATER: tuple[int | tuple[int, int], ...] = (3, (4, 8), 4)
"""What a second turn asks."""


def converse(executor: Any, name: str, count: int, **fields: Any) -> dict[str, Any]:
    """Two turns of every conversation, all at once, over kept prefixes; their tokens are those of transformers. Returns the statistics."""
    engine = Engine(executor, refresh_every_s=None, prefix_cache=PrefixCacheSettings())
    prompts = {case: towers.prompt(name, list(parts), seed) for seed, (case, parts) in enumerate(CASES.items())}
    for turn in range(2):
        sinks = toy.finished(engine, [asked(case, prompt, count=count, **fields) for case, prompt in prompts.items()])
        for place, ((case, prompt), sink) in enumerate(zip(prompts.items(), sinks, strict=True)):
            answer = sink.tokens
            assert (len(answer), sink.end.message) == (count, None), (case, turn)
            assert prompt.greedy(name, answer) == answer, (case, turn)
            prompts[case] = prompt.then(answer, towers.prompt(name, list(LATER), 20 + place))
    return engine.stats()


def test_two_turns(executor: CpuExecutor) -> None:
    stats = converse(executor, NAME, TOKENS)
    assert stats["prefix_cache_hits_total"] > 0
    # Of eight in the first turn and five that come to them; pages that end within a picture have it encoded once more, if its rows went.
    assert stats["encoded_pictures_total"] >= 13


def test_drafts_of_an_eagle_head(tmp_path: Path) -> None:
    random: Any = SimpleNamespace(model=registry.find(towers.saved(NAME, tmp_path / "target")).model)
    (head := tmp_path / "eagle").mkdir()
    values = eagle.settings(random)
    save_file(eagle.tensors(values, 3, values["hidden_size"], ("d2t",)), head / "model.safetensors")
    (head / "config.json").write_text(json.dumps(values))
    stats = converse(CpuExecutor(built(tmp_path, 0, draft_model=str(head), num_speculative_tokens=2)), NAME, TOKENS)
    assert stats["spec_decode_num_draft_tokens_total"] > 0


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["", "tp=2", "dp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("name", [NAME, "width 64", f"{NAME}{towers.EXPERTS}", f"width 64{towers.EXPERTS}"])
def test_64_tokens_of_two_turns_with_and_without_drafts(tmp_path: Path, name: str, mesh: str) -> None:
    artifact = built(tmp_path, 2, name, mesh=mesh, max_model_len=256)
    with contextlib.ExitStack() as stack:
        if mesh:
            cluster = stack.enter_context(lead_ranks(artifact, None, RankSettings(threads=1), ranks.environment()))
            assert cluster is not None
            executor: Any = cluster.load_executor()
        else:
            executor = CpuExecutor(artifact)
            tiny.poison(executor)
        for drafts in (2, 0):
            stats = converse(executor, name, 64, speculative_tokens=drafts)
            assert (stats["spec_decode_num_draft_tokens_total"] > 0) == bool(drafts)
