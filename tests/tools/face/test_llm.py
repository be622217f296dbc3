"""tools/face/llm.py: prompts become completions in this process, whole, streamed and awaited, with the tokens that transformers has."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import oracle, tiny

import npucompile as npc
from npucompile.graphs.errors import NpucompileError, RequestError, SpecError, UnknownModel
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.server.text.tokenizer import TextTokenizer
from npucompile.tools.face import llm as module
from npucompile.tools.ranks.offline import complete

PROMPTS = ["In the beginning", "a", "And it came to pass, that"]
DRAWN = npc.Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=11)


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> Any:
    with npc.LLM(tiny_artifact, progress=False) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def codec(tiny_artifact: Path) -> TextTokenizer:
    return TextTokenizer.load(tiny_artifact / str(Artifact.open(tiny_artifact).manifest.tokenizer))


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of a random checkpoint that transformers saved, by its name after it was built."""
    values = oracle.plain(2, vocab_size=260) if name == "qwen3" else oracle.settings("lf", vocab_size=260)
    random = oracle.build({**values, "bos_token_id": None, "eos_token_id": 256})
    random.theirs.save_pretrained(tmp_path / "random")
    tiny.byte_tokenizer().save(str(tmp_path / "random" / "tokenizer.json"))
    tiny.built(tiny.planned(tmp_path / "random"), tmp_path / "artifacts" / "random")
    monkeypatch.setenv("NPUCOMPILE_HOME", str(tmp_path))
    prompts = [random.prompt(length) for length in (1, 5, 17)]
    with npc.LLM("random", progress=False) as loaded:
        completions = loaded.generate(prompts, max_tokens=20)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = random.theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=256)[
            0, len(prompt) :
        ].tolist()
        ended = 256 in ids
        assert list(completion.token_ids) == (ids[: ids.index(256)] if ended else ids)
        assert completion.finish_reason == ("stop" if ended else "length")
        assert completion.prompt_token_ids == tuple(prompt)


@pytest.mark.parametrize("sampling", [npc.Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_completions_are_those_of_the_engine(llm: Any, codec: TextTokenizer, tiny_artifact: Path, sampling: Any) -> None:
    executor = CpuExecutor(Artifact.open(tiny_artifact))
    stop = frozenset(Artifact.open(tiny_artifact).manifest.model["eos_ids"])
    expected = [complete(executor, [codec.encode(prompt)], sampling, 24, stop)[0] for prompt in PROMPTS]
    completions = llm.generate(PROMPTS, sampling, max_tokens=24)
    assert [each.token_ids for each in completions] == [each.token_ids for each in expected]
    assert [each.text for each in completions] == [codec.decode(each.token_ids) for each in expected]
    assert [each.finish_reason for each in completions] == [each.reason for each in expected]
    assert llm.generate(PROMPTS[0], sampling, max_tokens=24) == [completions[0]] or completions[0].record.decode_steps


def test_a_stream_is_the_completion_in_pieces(llm: Any) -> None:
    (whole,) = llm.generate(PROMPTS[2], DRAWN, max_tokens=24, ignore_eos=True, logprobs=None)
    deltas = list(llm.stream(PROMPTS[2], DRAWN, max_tokens=24, ignore_eos=True))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert len(deltas) > 3


def test_completions_can_be_awaited_and_streamed_in_an_event_loop(llm: Any) -> None:
    whole = llm.generate(PROMPTS, max_tokens=12)

    async def streamed(prompt: str) -> str:
        return "".join([delta.text async for delta in llm.astream(prompt, max_tokens=12)])

    async def together() -> Any:
        awaited = llm.agenerate(PROMPTS, max_tokens=12)
        return await asyncio.gather(awaited, *map(streamed, PROMPTS))

    for _ in range(2):
        awaited, *texts = asyncio.run(together())
        assert [each.token_ids for each in awaited] == [each.token_ids for each in whole]
        assert texts == [each.text for each in whole]


def test_threads_share_one_engine(llm: Any) -> None:
    whole, found = llm.generate(PROMPTS, max_tokens=12), dict[int, Any]()

    def run(number: int) -> None:
        found[number] = llm.generate(PROMPTS[number % 3], max_tokens=12)[0].token_ids

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(6)] == [whole[number % 3].token_ids for number in range(6)]


def running(llm: Any) -> int:
    """Requests that the engine still has, once it had time to end them."""
    deadline = time.monotonic() + 10
    while (live := llm._engine.load[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return int(live)


def test_who_leaves_a_stream_cancels_the_rest(llm: Any) -> None:
    for _ in llm.stream("a", ignore_eos=True):
        break
    assert running(llm) == 0

    async def leave() -> None:
        async for _ in llm.astream("a", ignore_eos=True):
            return

    asyncio.run(leave())
    assert running(llm) == 0


def test_a_stop_string_ends_the_output_and_is_not_in_it(llm: Any) -> None:
    (whole,) = llm.generate(PROMPTS[1], max_tokens=12, ignore_eos=True)
    assert len(whole.text) > 4
    middle = whole.text[2:4]
    for stop in (middle, [middle, "never"]):
        (cut,) = llm.generate(PROMPTS[1], max_tokens=12, ignore_eos=True, stop=stop)
        assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(middle)], "stop")
    token = whole.token_ids[3]
    (cut,) = llm.generate(PROMPTS[1], max_tokens=12, ignore_eos=True, stop_token_ids=[token])
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(token)]
    assert running(llm) == 0


def test_log_probabilities_are_of_each_token(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tiny.built(tiny.planned(tiny_checkpoint, max_logprobs=2), tmp_path / "artifact")
    with npc.LLM(tmp_path / "artifact", progress=False) as loaded:
        (completion,) = loaded.generate("a", max_tokens=6, ignore_eos=True, logprobs=2)
        deltas = list(loaded.stream("a", max_tokens=6, ignore_eos=True, logprobs=2))
    assert len(completion.logprobs) == len(completion.token_ids) == 6
    assert all(entry.top[0] == (token, entry.logprob) for token, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    assert tuple(entry for delta in deltas for entry in delta.logprobs) == completion.logprobs


def test_no_prompts_have_no_completions(llm: Any) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("", {}, r"prompts\[0\] holds no tokens"),
        (["a", [1, "b"]], {}, r"prompts\[1\] is \[1, 'b'\]; legal is text or a list of token ids"),
        (3, {}, r"prompts is 3; legal is text, a list of token ids, or a list of these"),
        ([[10**6]], {}, r"token id 1000000 in prompts\[0\]; legal are 0 to 259"),
        (["a", "b" * 80], {}, r"prompts\[1\] has 80 .* the context of 'tiny' is 64 tokens"),
        ("a", {"max_tokens": 64}, r"prompts\[0\] has 1 tokens and max_tokens is 64; together at most 64 are legal"),
        ("a", {"max_tokens": "8"}, r"max_tokens is '8'; legal is a whole number, or None"),
        ("a", {"ignore_eos": 1}, r"ignore_eos is 1; legal is true or false"),
        ("a", {"stop": ["", "b"]}, r"stop is \['', 'b'\]; legal is a string that is not empty, or several"),
        ("a", {"stop_token_ids": ["b"]}, r"stop_token_ids is \['b'\]; legal are token ids"),
        ("a", {"sampling": {"temperature": 1}}, r"sampling is \{'temperature': 1\}; legal is a Sampling"),
        ("a", {"top_k": 3}, r"there is no option top_k; legal are max_tokens, stop, "),
        ("a", {"logprobs": -1}, r"logprobs is -1; legal is"),
    ],
)
def test_what_is_not_legal_is_refused_and_nothing_runs(llm: Any, prompts: Any, options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, **options)
    with pytest.raises(RequestError, match=message):
        asyncio.run(llm.agenerate(prompts, **options))
    assert running(llm) == 0


def test_a_failed_engine_says_why(tiny_artifact: Path) -> None:
    with npc.LLM(tiny_artifact, progress=False) as loaded:
        stream = loaded.stream("a", ignore_eos=True)
        next(stream)
        loaded._engine.give_up("the device is gone")
        with pytest.raises(RequestError, match=r"prompts\[0\]: the device is gone"):
            list(stream)
        with pytest.raises(RequestError, match="the engine takes no new requests: the device is gone"):
            loaded.generate("a")


def test_what_is_closed_takes_nothing(tiny_artifact: Path) -> None:
    loaded = npc.LLM(tiny_artifact, progress=False)
    loaded.close()
    loaded.close()
    with pytest.raises(RequestError, match="the engine takes no new requests: it is stopping"):
        loaded.generate("a")


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_artifact: Path) -> None:
    monkeypatch.setenv("NPUCOMPILE_HOME", str(tmp_path))
    with pytest.raises(UnknownModel, match="'tinny' is neither a preset nor a directory"):
        npc.LLM("tinny")
    with pytest.raises(SpecError, match=r"was built for cpu; legal are auto and cpu"):
        npc.LLM(tiny_artifact, device="emulated")


class Builder:
    """Builds nothing: an artifact lies there when it is waited for."""

    made: Path
    failed = False

    def __init__(self, arguments: Any, out: Path, environment: Any) -> None:
        self.arguments, self.out, self.ended = arguments, out, 0

    def wait_servable(self) -> Artifact:
        return Artifact.open(self.made)

    def wait_complete(self) -> Artifact:
        if self.failed:
            raise NpucompileError("the build ended with status 1")
        return Artifact.open(self.made)

    def stop(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("failed", [False, True])
def test_a_model_is_built_to_the_end_before_it_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_artifact: Path, tiny_checkpoint: Path, failed: bool
) -> None:
    builders = list[Builder]()

    class Mine(Builder):
        made = tiny_artifact

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.failed = failed
            builders.append(self)

    monkeypatch.setattr("npucompile.tools.serve.serving.BackgroundBuild", Mine)
    monkeypatch.setenv("NPUCOMPILE_HOME", str(tmp_path))
    if failed:
        with pytest.raises(NpucompileError, match="the build ended with status 1"):
            npc.LLM(tiny_checkpoint, progress=False)
    else:
        with npc.LLM(tiny_checkpoint, progress=False) as loaded:
            assert loaded.generate("a", max_tokens=2)[0].finish_reason == "length"
    (builder,) = builders
    assert builder.arguments == [str(tiny_checkpoint)]
    assert builder.ended == 1


def test_ranks_of_a_mesh_generate_together(sharded: Any) -> None:
    whole, split = (Artifact.open(sharded(mesh)) for mesh in ("", "tp=2"))
    tokens = complete(CpuExecutor(whole), [[1, 2, 3]], npc.Sampling(), 8, frozenset())[0].token_ids
    with npc.LLM(split.path, progress=False) as loaded:
        assert loaded.generate([[1, 2, 3]], max_tokens=8, ignore_eos=True)[0].token_ids == tokens


def test_options_are_those_that_are_documented() -> None:
    documented = module.GenerateOptions.__doc__ or ""
    assert [name for name in module.GenerateOptions.__annotations__ if f"{name}:" not in documented] == []


@pytest.mark.long
def test_an_artifact_for_npus_generates_on_emulated_ones(npu_artifact: Any) -> None:
    """On one, and on four ranks, which are processes of their own."""
    tokens = []
    for mesh in ("", "dp=2,tp=2"):
        with npc.LLM(npu_artifact(mesh), device="emulated", progress=False) as loaded:
            tokens.append(loaded.generate([[1, 2, 3]], max_tokens=4, ignore_eos=True)[0].token_ids)
    assert len(tokens[0]) == 4
    assert tokens[0] == tokens[1]
