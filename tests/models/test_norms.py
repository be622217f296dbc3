"""models/norms.py: a bias is added after the weight has scaled, and never to the residual stream."""

from __future__ import annotations

import torch

from npucompile.models import norms

X, STREAM, WEIGHT, BIAS = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0)).unbind()


def test_the_bias_is_added_to_what_is_normalised() -> None:
    weight, bias = WEIGHT[0], BIAS[0]
    plain = norms.rms_norm(X, weight, 1e-6, 1.0)
    assert torch.equal(norms.rms_norm(X, {"weight": weight, "bias": bias}, 1e-6, 1.0), plain + bias)
    normed, total = norms.add_rms_norm(X, STREAM, weight, 1e-6, 0.0)
    biased, same = norms.add_rms_norm(X, STREAM, {"weight": weight, "bias": bias}, 1e-6, 0.0)
    assert torch.equal(biased, normed + bias)
    assert torch.equal(same, total)
