"""Log probabilities of a prompt, in the three ways in which clients ask for them, are those of transformers on the bundled model."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx
import openai
import pytest
import torch
from support import bundled
from transformers import AutoModelForCausalLM, AutoTokenizer

from npucompile.models import registry

SHORT = "And God said"
LONG = "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was upon " * 2
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 11}
CHECKPOINT = registry.find("qwen3.5-tiny").checkpoint_dir


def serve(stack: contextlib.ExitStack, out: Any, **options: Any) -> str:
    sizes = {"buckets": (4,), "prefill": (32,), "max_model_len": 192, "max_logprobs": 3}
    return stack.enter_context(bundled.served(out, **sizes, **options))[0]


@pytest.fixture(scope="module", params=[{}, {"score": (48,)}], ids=["decode steps", "score steps"])
def url(tmp_path_factory, request):
    with contextlib.ExitStack() as stack:
        yield serve(stack, tmp_path_factory.mktemp("scored") / "tiny", structured_outputs=4, **request.param)


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def expected():
    """Function: token ids to log probabilities of transformers at each position but the first, [len - 1, V]."""
    theirs = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)

    @torch.no_grad()
    def logprobs(ids: list[int]) -> torch.Tensor:
        return torch.log_softmax(theirs(torch.tensor([ids])).logits[0, :-1].float(), -1)

    return logprobs


def near(found: list[float], rows: torch.Tensor, ids: list[int]) -> None:
    assert found == pytest.approx([row[token].item() for row, token in zip(rows, ids, strict=True)], abs=1e-4)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("stream", [False, True])
def test_completions_echo_the_log_probabilities_of_prompts(client, tokenizer, expected, stream, options):
    """Of a batch with several completions each; the prompts are shorter and longer than a prefill chunk."""
    prompts = [tokenizer(text).input_ids for text in (SHORT, LONG)]
    assert len(prompts[0]) < 32 < len(prompts[1])
    ask = {"model": "tiny", "prompt": prompts, "max_tokens": 5, "n": 2, "extra_body": {"return_token_ids": True}, **options}
    plain = client.completions.create(**ask)
    answer = client.completions.create(**ask, logprobs=2, echo=True, stream=stream)
    found: list[dict[str, Any]] = [{"text": [], "token_ids": [], **{name: [] for name in NAMES}} for _ in range(4)]
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            found[choice.index]["text"].append(choice.text)
            found[choice.index]["token_ids"] += choice.token_ids
            for name in NAMES if choice.logprobs else ():
                found[choice.index][name] += getattr(choice.logprobs, name)
    for index, (one, without) in enumerate(zip(found, plain.choices, strict=True)):
        prompt = prompts[index // 2]
        assert one["token_ids"] == without.token_ids
        assert "".join(one["text"]) == tokenizer.decode(prompt) + without.text
        assert one["text"][0].startswith(tokenizer.decode(prompt))
        ids = [*prompt, *without.token_ids]
        assert one["tokens"] == [tokenizer.decode([token]) for token in ids]
        assert (one["token_logprobs"][0], one["top_logprobs"][0]) == (None, None)
        rows = expected(ids)
        near(one["token_logprobs"][1:], rows, ids[1:])
        for top, row in zip(one["top_logprobs"][1:], rows, strict=True):
            assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
        whole = "".join(one["text"])
        assert all(whole[start : start + len(text)] == text for start, text in zip(one["text_offset"], one["tokens"], strict=True))
    if not stream:
        assert answer.usage.prompt_tokens == sum(map(len, prompts)) == plain.usage.prompt_tokens
        assert answer.usage.completion_tokens == plain.usage.completion_tokens


NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_scored_without_any_output(client, tokenizer, expected, stream):
    ids = tokenizer(LONG).input_ids
    answer = client.completions.create(model="tiny", prompt=LONG, max_tokens=0, logprobs=0, echo=True, stream=stream)
    (chunk,) = answer if stream else [answer]
    (choice,) = chunk.choices
    assert (choice.text, choice.finish_reason, choice.logprobs.top_logprobs[1]) == (LONG, "length", {})
    near(choice.logprobs.token_logprobs[1:], expected(ids), ids[1:])
    if not stream:
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
    # One token has nothing before it.
    (alone,) = client.completions.create(model="tiny", prompt=ids[:1], max_tokens=0, logprobs=1, echo=True).choices
    scores = alone.logprobs
    assert (scores.token_logprobs, scores.top_logprobs, scores.text_offset, len(scores.tokens)) == ([None], [None], [0], 1)


def test_the_token_that_ends_an_output_is_counted_behind_an_echo(client, tokenizer, expected):
    """lm_eval takes the last position for the one token that it asks for, also where that ends the output."""
    prompt = tokenizer(SHORT).input_ids
    first = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, temperature=0, extra_body={"return_token_ids": True})
    (end,) = first.choices[0].token_ids
    ask = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, "extra_body": {"stop_token_ids": [end]}}
    (choice,) = client.completions.create(**ask, logprobs=1, echo=True).choices
    assert (choice.text, choice.finish_reason) == (SHORT, "stop")
    assert len(choice.logprobs.token_logprobs) == len(prompt) + 1
    near(choice.logprobs.token_logprobs[1:], expected([*prompt, end]), [*prompt[1:], end])


def entries(found: Any, rows: torch.Tensor, ids: list[int], most: int, tokenizer: Any) -> None:
    """vLLM's form."""
    assert found[0] is None
    assert len(found) == len(ids)
    for entry, row, token in zip(found[1:], rows, ids[1:], strict=True):
        likely = row.topk(most)
        assert {int(one) for one in entry} == {token, *likely.indices.tolist()}
        for one, shown in entry.items():
            assert shown["logprob"] == pytest.approx(row[int(one)].item(), abs=1e-4)
            rank = int((row > row[int(one)]).sum()) + 1
            assert shown["rank"] == (rank if rank <= most else None)
            assert shown["decoded_token"] == tokenizer.decode([int(one)])


def test_vllms_field(url, client, tokenizer, expected):
    ids = tokenizer(LONG).input_ids
    ask = {"model": "tiny", "max_tokens": 3, "temperature": 0}
    plain = client.completions.create(prompt=LONG, **ask)
    (choice,) = client.completions.create(prompt=LONG, **ask, extra_body={"prompt_logprobs": 3}).choices
    assert (choice.text, choice.logprobs) == (plain.choices[0].text, None)
    entries(choice.prompt_logprobs, expected(ids), ids, 3, tokenizer)
    messages = [{"role": "user", "content": SHORT}]
    extra = {"prompt_logprobs": 3, "return_token_ids": True}
    chat = client.chat.completions.create(messages=messages, n=2, extra_body=extra, **ask)
    prompt = chat.choices[0].prompt_token_ids
    entries(chat.prompt_logprobs, expected(prompt), prompt, 3, tokenizer)
    assert chat.choices[0].message.content == client.chat.completions.create(messages=messages, **ask).choices[0].message.content
    for most, stream in ((4, False), (1, True)):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(prompt="a", stream=stream, extra_body={"prompt_logprobs": most}, **ask)
        assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize("start", [0, 40])
def test_sglangs_fields(url, tokenizer, expected, start):
    ids = tokenizer(LONG).input_ids
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    params = {"max_new_tokens": 3, "temperature": 0, "n": 2}
    plain = httpx.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": params}).json()
    rows = expected(ids)[start:]
    for one, without in zip(httpx.post(f"{url}/generate", json={**body, "sampling_params": params}).json(), plain, strict=True):
        meta = one["meta_info"]
        assert one["output_ids"] == without["output_ids"]
        assert (meta["prompt_tokens"], len(meta["output_token_logprobs"])) == (len(ids), 3)
        assert [entry[1:] for entry in meta["input_token_logprobs"]] == [[token, tokenizer.decode([token])] for token in ids[start:]]
        assert meta["input_token_logprobs"][0][0] is meta["input_top_logprobs"][0] is None
        near([entry[0] for entry in meta["input_token_logprobs"][1:]], rows, ids[start + 1 :])
        for top, row in zip(meta["input_top_logprobs"][1:], rows, strict=True):
            near([entry[0] for entry in top], row.expand(2, -1), [entry[1] for entry in top])
    refused = httpx.post(f"{url}/generate", json={**body, "logprob_start_len": len(ids)}).json()
    assert f"up to {len(ids) - 1}, the last position" in refused["error"]["message"]


def test_a_build_that_cannot_is_told_by_the_name_of_the_field(tmp_path):
    with contextlib.ExitStack() as stack:
        url = serve(stack, tmp_path / "plain", structured_outputs=0)
        for path, body, field in (
            ("/v1/completions", {"prompt": "ab", "echo": True, "logprobs": 1}, "logprobs"),
            ("/v1/completions", {"prompt": "ab", "prompt_logprobs": 1}, "prompt_logprobs"),
            ("/generate", {"text": "ab", "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ):
            error = httpx.post(f"{url}{path}", json=body).json()["error"]
            assert (error["param"], "--structured-outputs" in error["message"]) == (field, True)
