"""tools/quantize/forward.py: eager logits are those of transformers, in rows and windows."""

from __future__ import annotations

import pytest
import torch
from support import oracle, quantised

from npucompile.graphs.errors import SpecError
from npucompile.models import registry
from npucompile.models.quant.formats import Formats
from npucompile.tools.quantize.forward import in_formats, loaded, logits, read_text, token_ids, windows


@pytest.mark.parametrize("name", ["plain-moe", "dense-tied"])
def test_logits_are_those_of_transformers(name):
    random = oracle.case(name)
    rows = [random.prompt(11, seed) for seed in (1, 2)]
    ours = logits(random.model, random.weights, torch.tensor(rows, dtype=torch.int32), torch.float32)
    for row, ids in zip(ours, rows, strict=True):
        torch.testing.assert_close(row, random.logits(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("length", "overlap", "sizes"), [(4, 0, [4, 4, 2]), (4, 1, [4, 4, 4]), (20, 1, [10])])
def test_windows_share_tokens(length, overlap, sizes):
    tokens = torch.arange(10)
    parts = list(windows(tokens, length, overlap))
    assert [part.shape for part in parts] == [(1, size) for size in sizes]
    assert torch.equal(torch.cat([parts[0][0], *(part[0, overlap:] for part in parts[1:])]), tokens)


def test_a_model_needs_weights_and_text_a_tokenizer(tmp_path):
    with pytest.raises(SpecError, match="has no weights; legal is a checkpoint directory or a bundled model"):
        loaded(registry.find("qwen3.5-27b"), torch.float32)
    source = registry.find(quantised.tiny.write_checkpoint(tmp_path, tokenizer=False))
    with pytest.raises(SpecError, match=r"has no tokenizer\.json, which text needs"):
        token_ids(source, "a")
    for content, message in ((b"\xff", "is not UTF-8 text"), (b" \n", "is empty; legal is a file with text")):
        (tmp_path / "text").write_bytes(content)
        with pytest.raises(SpecError, match=message):
            read_text(tmp_path / "text")


def test_quantised_experts_are_stored_for_grouped_products():
    model = oracle.case("plain-moe").model
    assert in_formats(model, Formats((("*.experts.*", "w8a8_dynamic"),))).config.variant.grouped
    assert not in_formats(model, Formats((("*.self_attn.*", "w8a8_dynamic"),))).config.variant.grouped
