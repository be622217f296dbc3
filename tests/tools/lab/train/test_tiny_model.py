"""tools/lab/train/tiny_model.py: losses are those of plain next-token prediction, through the served functions."""

import math

import pytest
import torch
from support import tiny

from npucompile.graphs import tree
from npucompile.models import decoder, hybrid, qwen3_5
from npucompile.tools.lab.train import tiny_model


@pytest.fixture(scope="module")
def cfg() -> hybrid.Config:
    return qwen3_5.read_config({**tiny_model.hf_config(39), **tiny.TRAINING_SIZES})


def test_the_bundled_sizes() -> None:
    cfg = qwen3_5.read_config(tiny_model.hf_config(2045))
    leaves = tree.flatten(hybrid.abstract_params(cfg, torch.bfloat16))
    assert set(cfg.layer_types) == {"linear_attention", "full_attention"}
    assert cfg.num_experts
    assert cfg.mtp_num_hidden_layers == 1
    assert 3e6 <= sum(math.prod(p.aval.shape) for _, p in leaves) <= 6e6
    assert sum(p.aval.nbytes for _, p in leaves) <= 12e6


def test_initial_decay_lies_where_it_says(cfg: hybrid.Config) -> None:
    for path, value in tree.flatten(tiny_model.initial_params(cfg, 0)):
        assert torch.isfinite(value).all(), path
        if path.endswith("a_log"):
            assert ((value.exp() >= 1) & (value.exp() <= 16)).all()
        if path.endswith("dt_bias"):
            step = torch.nn.functional.softplus(value)
            assert ((step >= 0.00099) & (step <= 0.101)).all()


def test_balance_is_one_when_even_and_grows_when_not() -> None:
    even = torch.eye(4).repeat(8, 1) * 20
    assert tiny_model.balance_loss([even], 1).item() == pytest.approx(1.0, abs=1e-4)
    lopsided = torch.tensor([[20.0, 0.0, 0.0, 0.0]]).repeat(8, 1)
    assert tiny_model.balance_loss([lopsided], 1).item() == pytest.approx(4.0, abs=1e-3)
    assert tiny_model.balance_loss([even, lopsided], 1).item() == pytest.approx(2.5, abs=1e-3)


def test_joint_losses_reach_every_parameter_and_equal_plain_cross_entropy(cfg: hybrid.Config) -> None:
    params = tiny_model.initial_params(cfg, 1)
    leaves = [value.requires_grad_() for _, value in tree.flatten(params)]
    windows = torch.randint(0, 40, (2, 18), generator=torch.Generator().manual_seed(2))
    losses = tiny_model.joint_losses(cfg, params, windows, True)
    step = tiny_model.fresh_step(cfg, 2, 16)
    with torch.no_grad():
        hidden, state, _ = hybrid.forward(cfg, params, step.state, {**step.inputs, "tokens": windows[:, :-2].int()})
        main = torch.nn.functional.cross_entropy(decoder.head(cfg, params, hidden), windows[:, 1:-1].flatten())
        shifted = {**step.inputs, "tokens": windows[:, 1:-1].int()}
        fused, state = hybrid.extend_draft_cache(cfg, params, state, shifted, hidden, first=True)
        drafted = hybrid.draft(cfg, params, state, shifted, fused)
        draft = torch.nn.functional.cross_entropy(decoder.head(cfg, params, drafted), windows[:, 2:].flatten())
    assert losses.main.item() == pytest.approx(main.item(), abs=1e-5)
    assert losses.draft.item() == pytest.approx(draft.item(), abs=1e-5)
    grads = torch.autograd.grad(losses.main + losses.draft + losses.balance, leaves, allow_unused=True)
    for (path, _), grad in zip(tree.flatten(params), grads, strict=True):
        assert grad is not None, path
        assert torch.isfinite(grad).all(), path
    assert tiny_model.joint_losses(cfg, params, windows, False).draft.item() == 0
