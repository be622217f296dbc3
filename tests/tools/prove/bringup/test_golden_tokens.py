"""tools/prove/bringup/golden_tokens.py: an artifact answers as transformers does, and where it goes another way is named."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from support import bringups, faulty, oracle, tiny
from transformers import AutoConfig, AutoModelForCausalLM

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.request import Logprobs
from npucompile.tools.builder import driver, pool
from npucompile.tools.prove import golden
from npucompile.tools.prove.bringup import golden_tokens
from npucompile.tools.prove.bringup.golden_tokens import FLOATS, QUANTISED, run_golden
from npucompile.tools.prove.golden import Golden, GoldenPrompt

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "intermediate_size": 96,
}
SPREAD = 20.0
"""Of the logits: random weights leave all tokens as likely."""
# Places of (id, log probability), and an answer that takes the first of each.
TOP = tuple(((10 * i, -0.1), (10 * i + 1, -0.4), (10 * i + 2, -4.0)) for i in range(1, 6))
PROMPT = GoldenPrompt((7, 8), tuple(top[0][0] for top in TOP), TOP)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A random checkpoint of transformers, its artifact for one NPU, and a file of its golden tokens."""
    root = tmp_path_factory.mktemp("golden")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**oracle.settings("lf", **SIZES))).float().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(SPREAD)
    model.save_pretrained(root / "checkpoint")
    options = {"buckets": (4,), "num_speculative_tokens": 0, "max_logprobs": 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "run", tiny.compile_once)
        driver.build(tiny.planned_device(root / "checkpoint", mesh="1", **options), root / "out", root / "cache", tiny.QUIET, jobs=1)
    result = tiny.cli(root, "golden", root / "checkpoint", "--out", root / "file", "--tokens", 12)
    assert result.exit_code == 0, result.output
    return root, Artifact.open(root / "out")


def test_a_checkpoint_of_transformers_is_served_as_transformers_answers(made, tmp_path, monkeypatch):
    root, artifact = made
    for name, setting in artifact.manifest.environment.items():
        monkeypatch.setenv(name, setting.value)
    command = ("bringup", artifact.path, "--device", "emulated", "--golden", root / "file", "--only", "golden", "--report", tmp_path)
    result = tiny.cli(root, *command, "--json")
    assert result.exit_code == 0, result.output
    (rung,) = json.loads(result.stdout)["rungs"]
    facts = rung["facts"]
    assert (rung["name"], rung["passed"], rung["left_out"]) == ("golden", True, [])
    # Every place of all prompts, also behind ties.
    assert (facts["prompts"], facts["golden_tokens"]) == (8, 8 * 12)
    assert len(facts["ties"]) < 10
    assert facts["overlap"] > 0.9
    assert 0 < facts["logprob_error"] < FLOATS.error / 2
    assert "takes --golden FILE" in tiny.refused(root, "bringup", artifact.path, "--device", "emulated", "--only", "golden")


@pytest.mark.long
def test_a_device_that_loses_what_it_writes_is_found(made):
    root, artifact = made
    opens = faulty.Opens(functools.partial(faulty._lost_writes, faulty.is_decode))
    (result,) = bringups.ladder(artifact, opens, ["golden"], golden=golden.read(root / "file")).run()
    assert {failure.assumption for failure in result.failures} == {"kernels"}
    assert any("log probabilities are off by" in failure.message for failure in result.failures)
    assert result.facts["ties"]


class Answers:
    """Stands in for `complete`: answers the first token of each place but where it was told otherwise, and keeps the prompts."""

    def __init__(self, *others, shift=0.0, listed=True):
        self.others, self.shift, self.listed, self.asked = dict(others), shift, listed, []

    def __call__(self, executor, prompts, sampling, count, stop, *, logprobs):
        self.asked += prompts
        done = []
        for prompt in prompts:
            first = len(prompt) - len(PROMPT.prompt)
            tokens = [self.others.get(i, PROMPT.tokens[i]) for i in range(first, first + count)]
            tops = [tuple((t, p - self.shift) for t, p in TOP[i]) for i in range(first, first + count)]
            listed = tuple(Logprobs(top[0][1], top[:logprobs]) for top in tops) if logprobs else ()
            done.append(SimpleNamespace(token_ids=tuple(tokens), logprobs=listed))
        return done


def judged(monkeypatch, answers, allowed=FLOATS, prompts=(PROMPT,), vocab=99, **executor):
    monkeypatch.setattr(golden_tokens, "complete", answers)
    stub = SimpleNamespace(**{"vocab_size": 99, "max_logprobs": 5, "limits": SimpleNamespace(max_model_len=64), **executor})
    with tiny.QUIET.bar("golden", 0) as bar:
        failures, facts, left_out = run_golden(stub, Golden(vocab, {}, prompts), allowed, bar)
    return [failure.message for failure in failures], facts, left_out


def test_a_token_that_is_as_good_is_a_tie_and_the_prompt_goes_on_behind_the_golden_one(monkeypatch):
    answers = Answers((1, 21), (4, 51))
    wrong, facts, left_out = judged(monkeypatch, answers)
    assert (wrong, left_out) == ([], [])
    assert answers.asked == [(7, 8), (7, 8, 10, 20)]
    assert facts["golden_tokens"] == 5
    assert facts["ties"][0] == "prompt 0, token 1: 21 where transformers takes 20, 0.30 less likely"
    assert (facts["overlap"], facts["logprob_error"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (Answers((3, 42)), "prompt 0, token 3: 42 where transformers takes 40, for which the first is less likely by 3.90"),
        (Answers((2, 77)), "prompt 0, token 2: 77 where transformers takes 30, for which the first is not among its 3 most likely"),
        (Answers(shift=0.2), "log probabilities are off by 0.200 on average; legal is 0.1"),
    ],
)
def test_another_way_is_named_with_its_first_place(monkeypatch, answers, message):
    wrong, facts, _ = judged(monkeypatch, answers)
    assert wrong == [message]
    assert facts["golden_tokens"] <= 5


def test_other_likely_tokens_are_found(monkeypatch):
    strange = tuple(((top[0][0], -0.1), (90, -1.0), (91, -2.0)) for top in TOP)
    wrong, _, _ = judged(monkeypatch, Answers(), prompts=(GoldenPrompt(PROMPT.prompt, PROMPT.tokens, strange),))
    assert wrong == ["33% of the most likely tokens are the same; legal is 70%"]


def test_what_int8_rounds_may_be_further_off(monkeypatch):
    assert judged(monkeypatch, Answers(shift=0.2), QUANTISED)[0] == []


def test_what_cannot_be_compared_is_said(monkeypatch):
    wrong, facts, left_out = judged(monkeypatch, Answers((3, 42)), max_logprobs=0)
    assert left_out == ["log probabilities: the artifact returns none (build --max-logprobs 3)"]
    assert len(wrong) == 1
    assert "overlap" not in facts
    assert judged(monkeypatch, Answers(), limits=SimpleNamespace(max_model_len=6))[2] == ["prompt 0: longer than the context"]
    assert judged(monkeypatch, Answers(), vocab=100)[0] == ["the file is of a model of 100 ids, the artifact of one of 99"]
