"""Prompts with pictures through whole programs, against transformers: chunks, batches, decode steps, drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import eagle, fleets, towers
from support.towers import Prompt, Server, prompt

from npucompile.graphs.errors import ModelError, SpecError
from npucompile.graphs.types import Bucket, Limits, Mesh
from npucompile.models import registry, step
from npucompile.models.variant import Variant
from npucompile.runtime.picture_spans import positions

NAME = "small patches"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
PARTS: dict[str, list[int | tuple[int, int]]] = {
    "one": [4, (8, 6), 3],
    "first": [(4, 12), 2],
    "three": [2, (6, 4), 5, (4, 10), 1, (2, 2), 4],
    "text": [17],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return towers.saved(NAME, tmp_path_factory.mktemp("tower"))


@pytest.fixture
def server(directory: Path) -> Callable[[int], Server]:
    return lambda drafts=0: Server(NAME, directory, drafts)


def requests(*kinds: str) -> list[Prompt]:
    made = [prompt(NAME, PARTS[kind], seed) for seed, kind in enumerate(kinds)]
    for place, request in enumerate(made):
        request.place = place
    return made


def started(server: Server, asked: list[Prompt], chunk: int) -> torch.Tensor:
    """Prefills prompts in chunks; logits after each prompt's last token, which is sampled and added."""
    longest = max(request.count for request in asked)
    bucket, logits = Bucket("prefill", len(asked) + 1, chunk), {}
    for request in asked:
        server.encode(request)
    for begin in range(0, longest, chunk):
        live = [request for request in asked if request.count > begin]
        out = server.prefill(bucket, live, begin, begin + chunk)
        for request, token, row in zip(live, out["tokens"][:, 0].tolist(), out["logits"][:, 0], strict=True):
            if request.count <= begin + chunk:
                logits[request.place] = row
                request.tokens.append(token)
    return torch.stack([logits[request.place] for request in asked])


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_a_prompt_in_chunks_has_the_logits_of_transformers(server: Callable[..., Server], kind: str, chunk: int) -> None:
    (request,) = asked = requests(kind)
    made = started(server(), asked, chunk)
    del request.tokens[-1]
    torch.testing.assert_close(made[0], request.logits(NAME)[-1], **TOLERANCE)


def test_requests_with_and_without_pictures_decode_as_in_transformers(server: Callable[..., Server]) -> None:
    asked, running = requests("three", "text", "one"), server()
    started(running, asked, 16)
    bucket = Bucket("decode", 4, 1)
    for _ in range(12):
        before = [request.logits(NAME)[-1] for request in asked]
        out = running.decode(bucket, asked)
        torch.testing.assert_close(out["logits"][:, 0], torch.stack(before), **TOLERANCE)


@pytest.mark.parametrize("chunk", [7, 64])
def test_drafts_change_no_token(server: Callable[..., Server], chunk: int) -> None:
    plain, drafted = requests("three", "text", "one"), requests("three", "text", "one")
    one, two = server(), server(2)
    started(one, plain, 16)
    started(two, drafted, chunk)
    for _ in range(16):
        one.decode(Bucket("decode", 4, 1), plain)
        two.decode(Bucket("decode", 4, 3), drafted)
    for a, b in zip(plain, drafted, strict=True):
        assert a.tokens[: a.count + 16] == b.tokens[: b.count + 16]


def as_vocabulary(server: Server, request: Prompt) -> None:
    """Makes the rows of a request's pictures tokens of a longer table: another way to read them, which needs no pool."""
    server.encode(request)
    table = server.weights["embed"]
    server.weights = {**server.weights, "embed": torch.cat([table, server.state["picture_pool"][: server.used].flatten(0, 2).nan_to_num()])}
    request.tokens = [len(table) + row if row else token for token, row in zip(request.tokens, request.rows, strict=True)]
    request.rows = [0] * request.count


@pytest.mark.parametrize("kind", ["one", "first", "three"])
@pytest.mark.parametrize("chunk", [64, 7, 3])
def test_the_draft_head_reads_rows_of_pictures(server: Callable[..., Server], kind: str, chunk: int) -> None:
    """Whether a picture's first row is behind a chunk or in it, and wherever a picture is cut."""
    (one,), (other,) = requests(kind), requests(kind)
    by_rows, by_ids = server(2), server(2)
    by_rows.encode(one)
    as_vocabulary(by_ids, other)
    for begin in range(0, one.count, chunk):
        bucket, pairs = Bucket("prefill", 2, chunk), ((by_rows, one), (by_ids, other))
        made, wanted = (each.prefill(bucket, [asked], begin, begin + chunk) for each, asked in pairs)
    torch.testing.assert_close(made["logits"], wanted["logits"], rtol=1e-5, atol=1e-5)
    assert torch.equal(made["drafts"], wanted["drafts"])
    pages = slice(1, 1 + -(-one.count // towers.PAGE))
    for name in ("k", "v"):
        kept, same = (each.state["mtp"][name][pages].flatten(0, 1)[: one.count] for each in (by_rows, by_ids))
        assert kept.isfinite().all()
        torch.testing.assert_close(kept, same, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [64, 7])
def test_an_eagle_head_reads_rows_of_pictures_at_their_times(directory: Path, chunk: int) -> None:
    """Its oracle is a pass of plain torch over hidden states of transformers, with rows of its tower in the places of pictures."""
    (request,) = requests("three")
    values = eagle.settings(SimpleNamespace(model=registry.find(directory).model))
    own = eagle.tensors(values, 3, values["hidden_size"], ("d2t",))
    running = Server(NAME, directory, 2, head=(values, own))
    table, count = towers.model(NAME).get_input_embeddings().weight, 0
    rows = towers.rows(NAME, request.pixels, request.grids)
    oracle = eagle.Head(
        SimpleNamespace(theirs=towers.model(NAME)), values, {**own, "embed_tokens.weight": torch.cat([table, rows])}, (1, 1, 2)
    )
    running.encode(request)
    for begin in range(0, request.count, chunk):
        out = running.prefill(Bucket("prefill", 2, chunk), [request], begin, begin + chunk)
    request.tokens.append(int(out["tokens"][0, 0]))
    for _ in range(6):
        made, known = out["drafts"][0].tolist(), len(request.tokens)
        ids, count = list(request.tokens), 0
        for span in request.spans:
            ids[span.first : span.end] = range(len(table) + count, len(table) + count + span.rows * span.columns)
            count += span.rows * span.columns
        # Behind a prompt every token is one further.
        times = positions(request.count, request.spans)[:, 0]
        times = torch.cat([torch.from_numpy(times), times[-1] + torch.arange(1, known + 2 - request.count)])
        computed = Prompt(request.tokens[: request.count], request.grids, request.pixels)
        computed.tokens += request.tokens[request.count : -1]
        assert replace(oracle, places=times).drafts_from(computed.states(NAME), ids[1:], 2) == made
        out = running.decode(Bucket("decode", 2, 3), [request])


def test_a_head_of_another_width_than_its_model_takes_no_pictures(directory: Path) -> None:
    values = eagle.settings(SimpleNamespace(model=registry.find(directory).model), hidden_size=32, target_hidden_size=44)
    own = eagle.tensors(values, 3, 44, ("d2t", "embed_tokens.weight"))
    with pytest.raises(ModelError, match="rows of pictures have 44 channels, and the draft head's embedding 32; legal is"):
        started(Server(NAME, directory, 2, head=(values, own)), requests("one"), 16)


def test_any_chunks_give_the_same_drafts(server: Callable[..., Server]) -> None:
    drafts = []
    for chunk in (64, 7, 3):
        asked, running = requests("three"), server(3)
        started(running, asked, chunk)
        drafts.append([running.decode(Bucket("decode", 2, 4), asked)["drafts"].tolist() for _ in range(4)])
    assert drafts[0] == drafts[1] == drafts[2]


def test_decode_steps_write_what_a_prompt_would(server: Callable[..., Server]) -> None:
    """Positions behind a picture come from a request slot, and in a prompt from the host; keys of all layers tell them apart."""
    (request,) = asked = requests("one")
    stepped, at_once = server(2), server(2)
    started(stepped, asked, 16)
    while len(request.tokens) < request.count + 8:
        stepped.decode(Bucket("decode", 2, 3), asked)
    longer = Prompt(request.tokens[:-1], request.grids, request.pixels)
    at_once.encode(longer)
    at_once.prefill(Bucket("prefill", 1, 64), [longer], 0, longer.count)
    pages = slice(1, 1 + -(-longer.count // towers.PAGE))
    for kept, same in zip(*((each.state["layers"][3]["k"], each.state["mtp"]["k"]) for each in (stepped, at_once)), strict=True):
        kept, same = (pool[pages].flatten(0, 1)[: longer.count] for pool in (kept, same))
        torch.testing.assert_close(kept, same, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("mesh", "experts"), [("tp=2", False), ("dp=2,tp=2", True)])
def test_ranks_give_what_one_device_gives(mesh: str, experts: bool) -> None:
    where, drafts, rows = Mesh.parse(mesh), 2, 12
    variant = Variant(grouped=experts)
    fleet = fleets.Fleet(fleets.model(variant, experts=experts), where, drafts=drafts, picture_rows=rows)
    plain = fleets.model(experts=experts)
    devices = [fleets.OneDevice(plain, drafts, rows) for _ in range(where.axis("dp"))]
    draw = torch.Generator().manual_seed(4)
    pool = torch.randn(rows, 1, 1, plain.config.hidden_size, generator=draw)
    pool[0] = float("nan")
    for device in devices:
        device.state["picture_pool"] = pool.clone()
    for state in fleet.state:
        state[fleet.names.index("picture_pool")] = pool.clone()
    serving = fleets.Serving(2, drafts, [2] * len(devices))
    for bucket, inputs in serving.steps(3):
        if bucket.kind == "prefill":
            B, Q = bucket.batch, bucket.q_len
            for own in inputs:
                own["positions"] = torch.randint(0, 40, (B, Q, 3), generator=draw, dtype=torch.int32)
                own["picture_rows"] = torch.randint(-rows, rows, (B, Q + 1), generator=draw, dtype=torch.int32).clamp(min=0)
        outputs = fleet.step(bucket, inputs)
        for made, device, own in zip(outputs, devices, inputs, strict=True):
            wanted, valid = device.step(bucket, own), fleets.valid_positions(bucket, own)
            torch.testing.assert_close(made["logits"][valid], wanted["logits"][valid], rtol=0, atol=5e-4)
            assert torch.equal(made["drafts"], wanted["drafts"])
        serving.commit(bucket, inputs, outputs)
    assert all(group for group in serving.output)


def test_equal_positions_on_all_axes_are_those_of_text_bit_for_bit(directory: Path) -> None:
    rotary = registry.find(directory).model.config.rotary
    places = torch.arange(50, dtype=torch.int32)
    for plain, on_axes in zip(rotary.angles(places), rotary.angles(places[:, None].expand(-1, 3)), strict=True):
        assert torch.equal(plain, on_axes)


def test_pictures_need_a_tower(directory: Path) -> None:
    limits = Limits(8, 9, 3, 64, picture_rows=8)
    model = registry.find("qwen3-0.6b").model
    with pytest.raises(SpecError, match="8 rows of pictures, and qwen3 has no vision tower; legal is 0"):
        step.program(model, Bucket("prefill", 1, 8), limits, torch.float32)
    with pytest.raises(SpecError, match="1 rows of pictures; legal is at least 2"):
        Limits(8, 9, 3, 64, picture_rows=1)
