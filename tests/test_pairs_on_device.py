"""Pairs of two servers of emulated devices: a small model of every family, quantised and with drafts, answers as one server does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support import optional, ranks, tiny
from support.device_families import CASES, Case, checkpoints, planned
from support.fleet import Fleet
from support.servers import Server
from support.texts import byte_tokenizer
from tokenizers import Tokenizer

from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.run import running
from npucompile.server.text.tokenizer import TextTokenizer
from npucompile.tools.ranks.executors import load_executor
from npucompile.tools.ranks.rank_settings import RankSettings

SIZES: dict[str, Any] = {"max_logprobs": 3, "structured_outputs": 2}
MESHES = {
    "qwen3.5": ("tp=2", "dp=2,tp=2"),
    "qwen3": ("dp=2,tp=2", "tp=2"),
    "qwen3-moe": ("tp=2", "dp=2,tp=2"),
    "qwen3-next": ("tp=2", "tp=2"),
    "deepseek-v3": ("tp=2", "dp=2"),
    "deepseek-v3.2": ("tp=2", "dp=2"),
    "deepseek-v3.2 captured": ("dp=2", "tp=2"),
}
"""Of the prefill and of the decode server: other dp groups as most rows have them, and other tp ranks where all hold whole latents."""

TEXT = [3 + (7 * place) % 50 for place in range(200)]
GRAMMAR = {"structured_outputs": {"regex": "([a-f]{2}[0-9]){3}"}}
PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
ASKED: list[dict[str, Any]] = [
    {"prompt": TEXT[:130]},
    # Both servers know its first page now.
    {"prompt": TEXT[:150], **PENALTIES},
    {"prompt": TEXT[:128], **GRAMMAR},
    {"prompt": TEXT[50:52], **SAMPLED},
    {"prompt": TEXT[:129], **GRAMMAR, **PENALTIES, **SAMPLED},
]
ROUNDING = 0.15
"""By which log probabilities may differ: servers compute other parts of a prompt together, and experts lie on other ranks."""
SPARSE_ROUNDING = 0.5
"""The same where rounding chooses another one of the sixteen keys that a token reads."""


@pytest.fixture(autouse=True)
def needed() -> Iterator[None]:
    optional.transfer_engine()
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tokenizer() -> Tokenizer:
    """Of bytes, with the token that ends an output, which a grammar needs."""
    bytewise = byte_tokenizer()
    bytewise.add_special_tokens(["<end>"])
    assert bytewise.token_to_id("<end>") == tiny.EOS
    return bytewise


def ask(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """What a server completes."""
    fields = {"max_tokens": 8, "temperature": 0, "logprobs": 3, "return_token_ids": True, "ignore_eos": True, **body}
    answer = httpx.post(f"{url}/v1/completions", json=fields, timeout=300)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def compare(url: str, alone: str, rounding: float = ROUNDING) -> None:
    """Compares a pair's answers with those of one server, until one of them takes another token that was as likely."""
    compared = known = 0
    for body in ASKED:
        answers = [ask(url, body), ask(alone, {**body, "cache_salt": "alone"})]
        choices = [answer["choices"][0] for answer in answers]
        tokens = [choice["token_ids"] for choice in choices]
        assert len(tokens[0]) == len(tokens[1]) == 8
        scores, tops = ([choice["logprobs"][name] for choice in choices] for name in ("token_logprobs", "top_logprobs"))
        for place, (ours, theirs) in enumerate(zip(*tokens, strict=True)):
            if ours != theirs:
                # What is sampled lies beside a bound between two tokens, which log probabilities do not tell.
                near = math.isclose(scores[0][place], scores[1][place], abs_tol=rounding)
                assert near or "temperature" in body, (body, place, tokens, scores, tops)
                break
            assert math.isclose(scores[0][place], scores[1][place], abs_tol=rounding), (body, place, tokens, scores)
            compared += 1
        known += answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert compared >= 24
    assert known >= 128


@contextmanager
def emulated(artifact: Path) -> Iterator[tuple[str, str]]:
    """A pair of one device each in this process, and its decode server as a server that computes prompts itself."""
    with ExitStack() as stack:
        settings = RankSettings(threads=1, device="emulated")
        fleet = Fleet(artifact, mixed=True, load=lambda opened: load_executor(opened, settings, stack, tiny.QUIET))
        stack.callback(fleet.close)
        fleet.connected()
        urls = []
        for engine in (fleet.decode, fleet.engine):
            model = ServedModel("tiny", fleet.engine.executor.limits.max_model_len, 260, frozenset({tiny.EOS}))
            service = Service(engine, TextTokenizer(tokenizer()), model)
            urls.append(f"http://127.0.0.1:{stack.enter_context(running(service, '127.0.0.1', 0)).port}")
        yield urls[0], urls[1]
        assert fleet.decode.stats()["kv_transfer_requests_total"] == len(ASKED)
        assert fleet.engine.stats()["compiles_after_ready_total"] == 0
        assert fleet.prefills[0].engine.stats()["compiles_after_ready_total"] == 0
        fleet.check()


def built(case: Case, home: Path, *meshes: str) -> list[Path]:
    """An artifact of one checkpoint for each mesh."""
    directory, options = checkpoints(case, home)
    tokenizer().save(str(directory / "tokenizer.json"))
    for number, mesh in enumerate(meshes):
        tiny.built(planned(case, directory, options, mesh, **SIZES), home / f"artifact-{number}")
    return [home / f"artifact-{number}" for number in range(len(meshes))]


def test_a_pair_of_two_devices_answers_as_one_server(tmp_path: Path) -> None:
    (artifact,) = built(CASES["qwen3.5"], tmp_path, "")
    with emulated(artifact) as (pair, alone):
        compare(pair, alone)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_pair_of_servers_answers_as_one(name: str, tmp_path: Path) -> None:
    """By the commands that serve it."""
    prefill, decode = built(CASES[name], tmp_path, *MESHES[name])
    with ExitStack() as stack:

        def started(artifact: Path, *role: object) -> Server:
            return stack.enter_context(closing(Server(artifact, "--no-build", "--device", "emulated", *role)))

        first = started(prefill, "--role", "prefill")
        second = started(decode, "--role", "decode", "--prefill", first.http)
        ranks.eventually(lambda: "kv_transfer_connections 1.0" in second.metrics())
        alone = started(decode)
        compare(second.http, alone.http, SPARSE_ROUNDING if "v3.2" in name else ROUNDING)
        assert f"npucompile:kv_transfer_requests_total {len(ASKED)}.0" in second.metrics()
        assert "npucompile:kv_transfer_rooms 0.0" in first.metrics()
        for server in (first, second, alone):
            assert "npucompile:compiles_after_ready_total 0" in server.metrics()
