"""models/draft_vocabulary.py: drafts are what the whole head says of the first tokens, and no output changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import oracle, speculators
from tokenizers import Tokenizer

from npucompile.graphs import tree
from npucompile.graphs.types import Aval, Leaf
from npucompile.models import decoder, draft_vocabulary, registry
from npucompile.models.checkpoint import load, open_checkpoint, save
from npucompile.models.quant.formats import W8A8_DYNAMIC, Formats
from npucompile.models.variant import PLAIN

ROWS = 40


def cut(model, rows=ROWS, variant=PLAIN):
    """The model, drafting from its first tokens."""
    return replace(model, config=replace(model.config, variant=replace(variant, draft_vocab=rows)), drafting=True)


def table(weights):
    """Rows of the head, or of the embedding that is tied to it."""
    return weights["head"] if "head" in weights else weights["embed"]


def saved(random, directory):
    return save(replace(random.model, drafting=True).params(torch.float32), random.weights, directory).parent


@pytest.mark.parametrize("name", ["dense", "dense-tied", "latent"])
def test_a_checkpoint_has_the_rows_in_its_head_or_in_the_embedding_that_is_tied_to_it(tmp_path, name):
    random = oracle.drafting(name)
    loaded = load(open_checkpoint(saved(random, tmp_path)), cut(random.model).params(torch.float32))
    rows = loaded.pop(draft_vocabulary.KEY)
    assert torch.equal(rows, table(random.weights)[:ROWS])
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tree.flatten(loaded), tree.flatten(random.weights), strict=True))
    # The rows are no tensor of a checkpoint: written with them it is the same file.
    params, both = cut(random.model).params(torch.float32), {**random.weights, draft_vocabulary.KEY: rows}
    again = save(params, {key: both[key] for key in params}, tmp_path / "again")
    assert again.read_bytes() == (tmp_path / again.name).read_bytes()


def test_int8_rows_are_the_first_ones_of_the_int8_head(tmp_path):
    random = oracle.drafting("dense-tied")
    int8 = replace(PLAIN, formats=Formats((("lm_head*", W8A8_DYNAMIC),)))
    loaded = load(open_checkpoint(saved(random, tmp_path)), cut(random.model, variant=int8).params(torch.float32))
    rows, head = loaded[draft_vocabulary.KEY], loaded["head"]
    assert rows["weight"].dtype == torch.int8
    assert rows.keys() == head.keys()
    hidden = torch.randn(3, random.model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    cfg = cut(random.model, variant=int8).config
    assert torch.equal(decoder.draft_logits(cfg, loaded, hidden), decoder.head(cfg, loaded, hidden)[:, :ROWS])


def test_a_bundled_model_drafts_from_few_tokens_and_says_the_same():
    random = oracle.drafting("qwen3.5-tiny")
    tokenizer = Tokenizer.from_file(str(registry.find("qwen3.5-tiny").tokenizer))
    prompts = [tokenizer.encode(text).ids for text in ("And the angel of the LORD said unto her, Behold, thou", "Blessed is the man that")]
    vocab = random.model.config.vocab_size
    said, counts = {}, {}
    for rows in (0, vocab // 2, 300):
        model = cut(random.model, rows) if rows else random.model
        weights = {**random.weights, draft_vocabulary.KEY: table(random.weights)[:rows]}
        server, requests = speculators.Server(model, weights, 3), [speculators.Request(ids, i + 1) for i, ids in enumerate(prompts)]
        server.serve(requests, 48)
        said[rows] = [request.output[:48] for request in requests]
        counts[rows] = sum(sum(request.counts) / len(request.counts) for request in requests) / len(requests)
    assert said[0] == said[vocab // 2] == said[300]
    assert 1 < counts[300] <= counts[vocab // 2] <= counts[0]


def test_without_drafts_there_are_no_rows():
    random = oracle.drafting("dense")
    assert draft_vocabulary.KEY not in replace(cut(random.model), drafting=False).params(torch.float32)
    assert draft_vocabulary.KEY in cut(random.model).params(torch.float32)


FLOAT, SCALES = Aval((7, 3), torch.float32, ("vocab", None)), Aval((7,), torch.float32, ("vocab",))
INTEGERS = Aval((3, 7), torch.int8, (None, "vocab"))


@pytest.mark.parametrize(
    "params, rows",
    [
        ({"draft_head": FLOAT}, 7),
        ({"draft_head.weight": INTEGERS, "draft_head.weight_scale": SCALES}, 7),
        ({"head": FLOAT}, 0),
    ],
)
def test_what_an_artifact_records_of_it_are_its_rows(params, rows):
    assert draft_vocabulary.recorded(Leaf(f"params.{path}", aval) for path, aval in params.items()) == rows
