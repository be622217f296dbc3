"""tools/lab/perplexity.py: perplexity is that of transformers, and quantised bundled models stay near it."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from support import oracle, quantised

from npucompile.graphs.errors import SpecError
from npucompile.models import registry
from npucompile.tools.lab import perplexity as bench
from npucompile.tools.lab.perplexity import main, perplexity
from npucompile.tools.quantize.forward import token_ids

BUNDLED = registry.find("qwen3.5-tiny")
assert BUNDLED.checkpoint_dir
LINES = (BUNDLED.checkpoint_dir / "prompts.txt").read_text().splitlines()
"""Beginnings of the chapters that the model was not trained on."""


def test_it_is_that_of_transformers():
    theirs, total, count = oracle.bundled("qwen3.5-tiny"), 0.0, 0
    for text in LINES[:3]:
        ids = token_ids(BUNDLED, text).tolist()
        scores = theirs.logits(ids)[:-1].log_softmax(-1)
        total -= float(scores.gather(1, torch.tensor(ids[1:])[:, None]).sum())
        count += len(ids) - 1
    assert perplexity("qwen3.5-tiny", LINES[:3], torch.float32) == pytest.approx(math.exp(total / count), rel=1e-4)


def test_a_text_needs_two_tokens():
    with pytest.raises(SpecError, match="legal is one of at least two tokens"):
        perplexity("qwen3.5-tiny", ["a"], torch.float32)


@pytest.mark.parametrize(("scheme", "most"), [("w8a8", 0.01), ("w4a8", 0.05)])
def test_quantised_models_stay_near_their_floats(tmp_path, scheme, most):
    """On a thousand tokens of held-out text; docs/benchmarks.md has the figures on all of it."""
    quantised.quantised(BUNDLED, tmp_path / "out", scheme)
    floats, rounded = (perplexity(name, LINES, torch.bfloat16) for name in ("qwen3.5-tiny", str(tmp_path / "out")))
    assert floats != rounded
    assert rounded < floats * (1 + most)


def test_the_first_model_is_compared_with(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "perplexity", lambda name, texts, dtype, kv_cache, family: {"a": 20.0, "b": 21.0}[name])
    (tmp_path / "text").write_text("text")
    monkeypatch.setattr(sys, "argv", ["perplexity", "--text", str(tmp_path / "text"), "a", "b"])
    main()
    assert capsys.readouterr().out.splitlines()[2:] == ["| a | 20.0000 | +0.00% |", "| b | 21.0000 | +5.00% |"]


def test_an_int8_cache_is_within_a_hundredth() -> None:
    floats, integers = (perplexity("qwen3.5-tiny", LINES, torch.bfloat16, kv_cache=dtype) for dtype in ("bfloat16", "int8"))
    assert floats != integers
    assert integers == pytest.approx(floats, rel=0.01)
