"""tools/lab/state_drift.py: rounding of states is measured, and nothing else."""

from __future__ import annotations

import pytest
import torch

from npucompile.tools.lab import state_drift

HALF_STEP = 2.0**-9
"""Largest relative error of one rounding to bfloat16."""


def test_a_state_that_is_written_once_has_the_error_of_one_rounding(monkeypatch):
    monkeypatch.setattr(state_drift, "PLACES", (1, 32))
    (first, state, _), (last, later, out) = state_drift.of_layer(0.0, 32)
    assert (first, last) == (1, 32)
    assert 0 < state < HALF_STEP < later < 32 * HALF_STEP
    assert 0 < out < 32 * HALF_STEP


def test_decay_forgets_errors(monkeypatch):
    monkeypatch.setattr(state_drift, "PLACES", (512,))
    ((_, kept, _),), ((_, forgotten, _),) = (list(state_drift.of_layer(decay, 512)) for decay in (0.0, 1.0))
    assert forgotten < kept


def test_a_model_drifts_by_its_states_alone(monkeypatch):
    monkeypatch.setattr(state_drift, "PLACES", (4, 8))
    with torch.inference_mode():
        early, late = state_drift.of_model("qwen3.5-tiny", 8, 2)
    assert (early.tokens, late.tokens) == (4, 8)
    assert 0 < early.states < 8 * HALF_STEP
    assert 0 < late.logits < 0.05
    assert 0.5 < late.agreement <= 1


def test_a_preset_without_weights_is_refused():
    with pytest.raises(SystemExit, match="has no weights"):
        next(state_drift.of_model("qwen3.5-397b", 1, 1))
