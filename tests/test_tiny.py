"""The house stands: a random checkpoint becomes an artifact, a server and a stream, in seconds."""

from __future__ import annotations

import asyncio

from npucompile.lowering.artifact import Artifact
from npucompile.runtime.engine import Engine
from npucompile.runtime.executor import Executor
from npucompile.runtime.request import Sampling
from npucompile.server.client import Client
from npucompile.server.run import serving
from npucompile.server.service import ServedModel, Service
from npucompile.server.text import TextCodec
from npucompile.tools.offline import complete

PROMPTS = ["In the beginning", "a", "And it came to pass, that there went out"]


def test_a_checkpoint_becomes_a_stream(tiny, tmp_path):
    model = tiny.write_checkpoint(tmp_path / "model", seed=7)
    tiny.built(tiny.planned(model, buckets=(1, 2), prefill=(16,)), tmp_path / "artifact", fresh=True)
    artifact = Artifact.open(tmp_path / "artifact")
    manifest = artifact.manifest
    codec = TextCodec.load(artifact.path / manifest.tokenizer)
    eos = frozenset(manifest.model["eos_ids"])
    prompts = [codec.encode(prompt) for prompt in PROMPTS]
    offline = [one for prompt in prompts for one in complete(Executor(artifact), [prompt], Sampling(), 16, eos)]

    executor = Executor(artifact)
    engine = Engine(executor)
    service = Service(engine, codec, ServedModel("tiny", manifest.limits.max_model_len, executor.vocab_size, eos))
    engine.start()
    try:
        with serving(service) as url:
            streamed = asyncio.run(stream(url))
    finally:
        engine.stop(drain=False)

    assert [tuple(tokens) for tokens, _ in streamed] == [one.token_ids for one in offline]
    assert [text for _, text in streamed] == [codec.decode(one.token_ids) for one in offline]
    assert len({one.token_ids for one in offline}) == len(PROMPTS)
    assert executor.compiles() == 0


async def stream(url):
    """All prompts at once over one socket; tokens and text of their deltas."""

    async def one(client, prompt):
        deltas = [e async for e in client.create(prompt, max_output_tokens=16) if e["type"] == "response.output_text.delta"]
        return [token for delta in deltas for token in delta["token_ids"]], "".join(delta["delta"] for delta in deltas)

    async with await Client.connect(url) as client:
        return await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS))
