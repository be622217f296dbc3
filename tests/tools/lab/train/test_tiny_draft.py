"""tools/lab/train/tiny_draft.py: drafts and losses of the draft head are those of a server."""

import pytest
import torch
from support import tiny

from npucompile.models import decoder, hybrid, qwen3_5
from npucompile.tools.lab.train import tiny_draft, tiny_model

ROWS, LENGTH = 2, 24


@pytest.fixture(scope="module")
def model():
    cfg = qwen3_5.read_config({**tiny_model.hf_config(39), **tiny.TRAINING_SIZES})
    return cfg, tiny_model.initial_params(cfg, 3)


@pytest.fixture(scope="module")
def texts():
    return torch.randint(0, 40, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(5))


def drafts_of_one_position(cfg, params, text, base, own_tokens):
    """As a server drafts: the head's cache holds entries of tokens up to `base`, then one token at a time is appended."""
    step = tiny_model.fresh_step(cfg, 1, LENGTH + 4)
    inputs = {**step.inputs, "query_lens": torch.tensor([base + 1], dtype=torch.int32)}
    ids = text.to(torch.int32)
    hidden, state, _ = hybrid.forward(cfg, params, step.state, {**inputs, "tokens": ids[None, : base + 1]})
    fused, state = hybrid.extend_draft_cache(cfg, params, state, {**inputs, "tokens": ids[None, 1 : base + 2]}, hidden, first=True)
    one_token = {**step.inputs, "query_lens": torch.ones(1, dtype=torch.int32)}
    last = {**one_token, "num_computed_tokens": torch.tensor([base], dtype=torch.int32), "tokens": ids[None, base + 1 : base + 2]}
    ahead = hybrid.draft(cfg, params, state, last, {name: rows[-1:] for name, rows in fused.items()})
    logits = [decoder.head(cfg, params, ahead)[0]]
    for j in range(tiny_draft.DEPTH - 1):
        token = int(logits[-1].argmax()) if own_tokens else int(text[base + 2 + j])
        inputs = {
            **one_token,
            "tokens": torch.tensor([[token]], dtype=torch.int32),
            "num_computed_tokens": torch.tensor([base + 1 + j], dtype=torch.int32),
        }
        fused, state = hybrid.extend_draft_cache(cfg, params, state, inputs, ahead, first=False)
        ahead = hybrid.draft(cfg, params, state, inputs, fused)
        logits.append(decoder.head(cfg, params, ahead)[0])
    return logits


@pytest.mark.parametrize("own_tokens", [False, True])
def test_unrolled_drafts_are_those_of_a_server(model, texts, own_tokens):
    cfg, params = model
    bases = torch.tensor([[0, 7, 20], [3, 12, 19]])
    out = tiny_draft.unroll(cfg, params, texts, bases, own_tokens=own_tokens)
    for row in range(ROWS):
        for column, base in enumerate(bases[row].tolist()):
            want = drafts_of_one_position(cfg, params, texts[row], base, own_tokens)
            unrolled = [out.first[row, base], *(logits[row, column] for logits in out.deeper)]
            for depth, (a, b) in enumerate(zip(unrolled, want, strict=True)):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, msg=lambda text, at=(row, base, depth): f"{at}: {text}")


def test_continuations_are_greedy_in_the_parallel_logits(model, texts):
    cfg, params = model
    longer = tiny_draft.continue_texts(cfg, params, texts[:, :8], 8, 0.0, torch.Generator())
    step = tiny_model.fresh_step(cfg, ROWS, 15)
    hidden, _, _ = hybrid.forward(cfg, params, step.state, {**step.inputs, "tokens": longer[:, :-1].to(torch.int32)})
    best = decoder.head(cfg, params, hidden).view(ROWS, 15, -1).argmax(-1)
    assert torch.equal(longer[:, :8], texts[:, :8])
    assert torch.equal(longer[:, 8:], best[:, 7:])


def test_acceptance_walks_by_accepted_tokens(model, texts, monkeypatch):
    cfg, params = model
    # The head always drafts token 1; the text repeats 1 1 1 1 0, so a step accepts up to three drafts.
    pattern = torch.tensor([1, 1, 1, 1, 0] * 5)[None]

    def always_one(cfg, params, texts, bases, *, own_tokens):
        logits = torch.zeros(1, texts.shape[1] - 1, 2)
        logits[..., 1] = 1.0
        deep = torch.zeros(1, bases.shape[1], 2)
        deep[..., 1] = 1.0
        return tiny_draft.Recursion(logits, logits, (deep, deep))

    monkeypatch.setattr(tiny_draft, "unroll", always_one)
    measured = tiny_draft.acceptance(cfg, params, pattern, 4)
    truth, at, counts = pattern[0].tolist(), 3, []
    while at < 24 - tiny_draft.DEPTH:
        agreed = 0
        while agreed < tiny_draft.DEPTH and truth[at + 2 + agreed] == 1:
            agreed += 1
        counts.append(agreed)
        at += agreed + 1
    assert measured.steps == len(counts)
    assert measured.mean_tokens == pytest.approx(1 + sum(counts) / len(counts))
    assert measured.rates[0] == pytest.approx(sum(c > 0 for c in counts) / len(counts))


def test_draft_losses_reach_only_the_head_and_fall(model, texts):
    cfg, params = model
    leaves = [leaf.clone().requires_grad_() for leaf in torch.utils._pytree.tree_leaves(params["mtp"])]
    own = {**params, "mtp": torch.utils._pytree.tree_unflatten(leaves, torch.utils._pytree.tree_structure(params["mtp"]))}
    bases = tiny_draft.random_bases(ROWS, LENGTH, 4, torch.Generator().manual_seed(1))
    optimiser = torch.optim.Adam(leaves, lr=1e-2)
    totals = []
    for _ in range(8):
        losses = tiny_draft.draft_losses(cfg, own, texts, bases)
        assert len(losses) == tiny_draft.DEPTH
        total = torch.stack(losses).mean()
        grads = torch.autograd.grad(total, leaves)
        assert all(grad.abs().sum() > 0 for grad in grads)
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        optimiser.step()
        totals.append(total.item())
    assert totals[-1] < totals[0] - 0.1
