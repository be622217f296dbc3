"""EleutherAI's lm_eval, unchanged, against the bundled model: it reports what transformers' model gives on the same data."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support import bundled
from support.optional import PYTHON, RUNS_CLIENTS
from transformers import AutoModelForCausalLM, AutoTokenizer

from npucompile.models import registry

CHECKPOINT = registry.find("qwen3.5-tiny").checkpoint_dir
CONTEXT, GENERATED = 64, 8

pytestmark = RUNS_CLIENTS

CHOICES = [
    {"text": "In the beginning God created the heaven and the", "choices": [" earth", " sea of Galilee", " men"], "answer": 0},
    {"text": "And it came to", "choices": [" pass", " be", " nothing at all"], "answer": 0},
    {"text": "Blessed be the", "choices": [" LORD God of Israel", " table", " name"], "answer": 0},
    {"text": "And the LORD spake unto Moses,", "choices": [" and went", " saying", " running"], "answer": 1},
    {"text": "The book of the", "choices": [" kings of Babylon", " law", " generation"], "answer": 2},
]  # fmt: skip
TEXTS = [
    {"text": "And God said, Let there be light: and there was light."},
    {"text": " ".join(["And God saw the light, that it was good."] * 6)},
]
TASKS = {
    "choose": (
        CHOICES,
        {
            "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "choices", "doc_to_target": "answer",
            "target_delimiter": "", "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
    ),
    "read": (
        TEXTS,
        {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
        },
    ),
    "write": (
        CHOICES,
        {
            "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "", "target_delimiter": "",
            "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": GENERATED, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    out = tmp_path_factory.mktemp("clients") / "tiny"
    with bundled.served(out, buckets=(4,), prefill=(32,), max_model_len=CONTEXT, max_logprobs=1) as (url, _):
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def theirs():
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def evaluate(home: Path, tasks: str, model: str, url: str, *options: object, **arguments: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """lm_eval's results and samples, by task."""
    for name, (rows, task) in TASKS.items():
        data = home / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (home / f"{name}.yaml").write_text(json.dumps(source | task))
    given = {"model": "qwen3.5-tiny", "base_url": url, "tokenizer": CHECKPOINT, "num_concurrent": 2, "max_length": CONTEXT, **arguments}
    words = ",".join(f"{name}={value}" for name, value in given.items())
    command = [PYTHON, "-m", "lm_eval", "run", "--model", model, "--model_args", words, "--tasks", tasks, "--include_path", home]
    command += ["--output_path", home / "out", "--log_samples", *options]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home / "cache"), "OPENAI_API_KEY": "none"}
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, cwd=home, env={**os.environ, **offline})
    assert run.returncode == 0, run.stdout + run.stderr
    (report,) = (home / "out").rglob("results_*.json")
    samples = {path.name.split("_")[1]: list(map(json.loads, path.read_text().splitlines())) for path in report.parent.glob("samples_*")}
    return json.loads(report.read_text())["results"], {task: sorted(rows, key=lambda row: row["doc_id"]) for task, rows in samples.items()}


@torch.no_grad()
def likelihood(theirs: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Log probability of tokens behind others, and whether they are the most likely ones."""
    rows = torch.log_softmax(theirs(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 : -1], -1)
    ids = torch.tensor(continuation)
    return rows.gather(1, ids[:, None]).sum().item(), bool((rows.argmax(-1) == ids).all())


def pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokens of both, as lm_eval parts them: those of the text beyond as many as the context alone has."""
    count = len(tokenizer(context).input_ids)
    whole = tokenizer(context + continuation).input_ids
    return whole[:count], whole[count:]


@torch.no_grad()
def greedy(theirs: Any, tokenizer: Any, prompt: list[int]) -> str:
    found = theirs.generate(torch.tensor([prompt]), max_new_tokens=GENERATED, do_sample=False)
    text = tokenizer.decode(found[0, len(prompt) :], skip_special_tokens=True)
    return min((text.split(stop)[0] for stop in ("\n", ".")), key=len)


def compared(theirs: Any, tokenizer: Any, results: dict[str, Any], samples: list[Any]) -> None:
    """Of multiple choices."""
    right = []
    for row, sample in zip(CHOICES, samples, strict=True):
        expected = [likelihood(theirs, *pair(tokenizer, row["text"], choice)) for choice in row["choices"]]
        found = [(float(score), str(most_likely) == "True") for ((score, most_likely),) in sample["resps"]]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-3)
        assert [most_likely for _, most_likely in found] == [most_likely for _, most_likely in expected]
        scores = [score for score, _ in expected]
        right.append(scores.index(max(scores)) == row["answer"])
    assert 0 < sum(right) < len(right)
    assert results["acc,none"] == pytest.approx(sum(right) / len(right))


def test_likelihoods_are_those_of_transformers(url, theirs, tokenizer, tmp_path):
    """Prompts are ids here, several in a request."""
    ids = {"tokenizer_backend": "huggingface", "tokenized_requests": True}
    results, samples = evaluate(
        tmp_path, "choose,read,write", "local-completions", f"{url}/completions", "--batch_size", 3, **ids
    )  # fmt: skip
    compared(theirs, tokenizer, results["choose"], samples["choose"])
    # One of them takes more than one window.
    assert max(len(tokenizer(row["text"]).input_ids) for row in TEXTS) > CONTEXT
    total = sum(windowed(theirs, tokenizer, row["text"]) for row in TEXTS)
    words, size = (sum(map(len, counted)) for counted in ([row["text"].split() for row in TEXTS], [row["text"].encode() for row in TEXTS]))
    assert results["read"]["byte_perplexity,none"] == pytest.approx(math.exp(-total / size), rel=1e-4)
    assert results["read"]["word_perplexity,none"] == pytest.approx(math.exp(-total / words), rel=1e-4)
    for row, sample in zip(CHOICES, samples["write"], strict=True):
        assert sample["resps"] == [[greedy(theirs, tokenizer, tokenizer(row["text"]).input_ids)]]


def test_prompts_may_be_texts(url, theirs, tokenizer, tmp_path):
    text = {"tokenizer_backend": "huggingface", "tokenized_requests": False}
    results, samples = evaluate(tmp_path, "choose", "local-completions", f"{url}/completions", **text)
    compared(theirs, tokenizer, results["choose"], samples["choose"])


def windowed(theirs: Any, tokenizer: Any, text: str) -> float:
    """Of all tokens of a text, each with as much before it as lm_eval's windows leave."""
    ids, most, total = tokenizer(text).input_ids, CONTEXT - 2, 0.0
    prefix = tokenizer.bos_token_id or tokenizer.eos_token_id
    total += likelihood(theirs, [prefix], ids[:most])[0]
    for start in range(most, len(ids), most):
        end = min(start + most, len(ids))
        window = ids[max(0, end - most - 1) : end]
        total += likelihood(theirs, window[: start - end], ids[start:end])[0]
    return total


def test_chats_are_continued_as_by_transformers(url, theirs, tokenizer, tmp_path):
    _, samples = evaluate(tmp_path, "write", "local-chat-completions", f"{url}/chat/completions", "--apply_chat_template")
    for row, sample in zip(CHOICES, samples["write"], strict=True):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": row["text"]}], add_generation_prompt=True, return_dict=False)
        assert sample["resps"] == [[greedy(theirs, tokenizer, prompt)]]
