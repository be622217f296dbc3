"""An end-to-end test in seconds: a random checkpoint becomes a verified artifact, a server and a stream.

Every response is generated with drafts, without drafts, and by an artifact built without drafts; all three must be equal.
"""

from __future__ import annotations

import asyncio

import pytest
from support import tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.request import Sampling
from npucompile.server.client import Client
from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.run import serving
from npucompile.server.text.tokenizer import TextTokenizer
from npucompile.tools.agreement.executables import verify
from npucompile.tools.ranks.offline import complete

PROMPTS = ["In the beginning", "a", "And it came to pass, that there went out"]
TOKENS = 24
OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 11},
    {"temperature": 0.0, "speculative_tokens": 1},
    {"temperature": 0.0, "speculative_tokens": 0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 11, "speculative_tokens": 0},
]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """Artifacts of one checkpoint, by k."""
    home = tmp_path_factory.mktemp("home")
    model = tiny.write_checkpoint(home / "model", seed=7, agreeing=True)
    for k, num_logprobs in ((3, 2), (0, 0)):
        sizes = {"buckets": (1, 4), "prefill": (16,), "num_speculative_tokens": k, "max_logprobs": num_logprobs}
        tiny.built(tiny.planned(model, **sizes), home / f"k{k}", fresh=True)
    return {k: Artifact.open(home / f"k{k}") for k in (3, 0)}


def test_what_was_built_is_proved(artifacts):
    for artifact in artifacts.values():
        assert {name: measured["token_mismatches"] for name, measured in verify(artifact, tiny.QUIET).items()} == {
            entry.bucket.name: 0 for entry in artifact.manifest.graphs
        }


def test_a_checkpoint_becomes_a_stream(artifacts):
    manifest = artifacts[3].manifest
    codec = TextTokenizer.load(artifacts[3].path / manifest.tokenizer)
    eos = frozenset(manifest.model["eos_ids"])
    executor = CpuExecutor(artifacts[3])
    engine = Engine(executor)
    service = Service(engine, codec, ServedModel("tiny", manifest.limits.max_model_len, executor.vocab_size, eos))
    engine.start()
    try:
        with serving(service) as url:
            streamed = asyncio.run(stream(url))
    finally:
        engine.stop(drain=False)
    assert executor.compiles() == 0

    plain = CpuExecutor(artifacts[0])
    for options, answers in zip(OPTIONS, streamed, strict=True):
        sampling = Sampling(**{name: value for name, value in options.items() if name != "speculative_tokens"})
        expected = [completion for prompt in PROMPTS for completion in complete(plain, [codec.encode(prompt)], sampling, TOKENS, eos)]
        assert [answer.token_ids for answer in answers] == [completion.token_ids for completion in expected]
        assert [answer.text for answer in answers] == [codec.decode(completion.token_ids) for completion in expected]
        assert len({answer.token_ids for answer in answers}) == len(PROMPTS)
        for answer in answers:
            check_usage(answer.usage, options.get("speculative_tokens", 3))
            check_logprobs(answer, greedy=sampling.temperature == 0.0)


async def stream(url):
    """Sends all prompts with all options at once over one socket."""

    async def completion(client, prompt, options):
        wanted = {"max_output_tokens": TOKENS, "top_logprobs": 2, "include": ["message.output_text.logprobs"], **options}
        return await client.create(prompt, **wanted).completion()

    async with await Client.connect(url) as client:
        rows = [asyncio.gather(*(completion(client, prompt, options) for prompt in PROMPTS)) for options in OPTIONS]
        return await asyncio.gather(*rows)


def check_usage(usage, drafts):
    """The draft counts in a response's usage are possible, and each token without a draft took a step of its own."""
    record = usage["npucompile"]
    steps, accepted = record["verify_steps"], record["accepted_per_position"]
    decode_steps = sum(record["decode_steps"].values())
    assert usage["output_tokens"] <= 1 + decode_steps + sum(accepted)
    if not drafts:
        assert (steps, record["drafted_tokens"], accepted, record["acceptance_length"]) == (0, 0, [0, 0, 0], None)
        assert decode_steps == usage["output_tokens"] - 1
    else:
        # The context ends, so there is no room for a draft.
        assert 0 < steps <= decode_steps
        assert record["drafted_tokens"] <= drafts * steps
        assert record["acceptance_length"] == 1 + sum(accepted) / steps > 1
        assert accepted == sorted(accepted, reverse=True)
        assert not any(accepted[drafts:])


def check_logprobs(answer, *, greedy):
    """Log probabilities of each token and of the two most likely ones; a greedy token is the first of those."""
    assert [entry["token_id"] for entry in answer.logprobs] == list(answer.token_ids)
    for entry in answer.logprobs:
        first, second = entry["top_logprobs"]
        assert 0 > first["logprob"] >= max(second["logprob"], entry["logprob"])
        assert not greedy or first["token_id"] == entry["token_id"]
