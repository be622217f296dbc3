"""models/latent_attention.py: its pools are those of latents; rows are permuted and back (logits: test_decoder.py)."""

from __future__ import annotations

import math

import torch
from support import oracle

from npucompile.models import latent_attention


def test_rotated_rows_are_half_split():
    """Of a head of four plain and six rotated channels, the last are pairs on disk: even ones come first."""
    params = latent_attention.params(oracle.case("latent").model.config, torch.float32, "a.")
    rows = torch.arange(4 * 16.0)[:, None].expand(-1, 20).contiguous()
    joined = params["q_up"].source.join(rows)[:, 0].view(4, 16)
    assert joined[1].tolist() == [16 + i for i in (*range(10), 10, 12, 14, 11, 13, 15)]
    assert torch.equal(params["q_up"].source.split(params["q_up"].source.join(rows))[0], rows)
    plain = latent_attention.params(oracle.case("latent-all-dense").model.config, torch.float32, "a.")["down"].source
    tensors = [torch.randn(shape) for shape in plain.shapes]
    assert torch.equal(plain.join(*tensors), torch.cat(tensors)), "files that do not interleave stay as they are"


def test_scores_are_scaled_as_the_published_models_do_with_yarn():
    config = oracle.case("latent-yarn").model.config
    assert math.isclose(latent_attention.scale(config), 16**-0.5 * (0.1 * math.log(8) + 1) ** 2)
    assert latent_attention.scale(oracle.case("latent").model.config) == 0.25
