"""models/block_scales.py: FP8 with a scale for each block reads as the floats it stands for, whole and in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from npucompile.graphs.errors import CheckpointError
from npucompile.graphs.types import Aval
from npucompile.models import checkpoint
from npucompile.models.block_scales import BLOCK, with_block_scales
from npucompile.models.params import Param, Source
from npucompile.models.safetensors_files import open_checkpoint

N, K = 2 * BLOCK + 64, 3 * BLOCK - 1
NAME = "model.layers.0.w.weight"


def written(directory: Path, scales: torch.Tensor | None, *lead: int) -> torch.Tensor:
    """Writes a matrix [..., N, K] and its scales, if any; returns the values as float32."""
    values = torch.randn(*lead, N, K, generator=torch.Generator().manual_seed(0)).mul(100).to(torch.float8_e4m3fn)
    tensors = {NAME: values} | ({} if scales is None else {f"{NAME}_scale_inv": scales})
    save_file(tensors, directory / "model.safetensors")
    return values.float()


def drawn(*lead: int) -> torch.Tensor:
    return torch.rand(*lead, 3, 3, generator=torch.Generator().manual_seed(1)) + 0.1


@pytest.mark.parametrize("lead", [(), (2,)])
def test_every_value_is_multiplied_by_the_scale_of_its_block(tmp_path: Path, lead: tuple[int, ...]) -> None:
    scales = drawn(*lead)
    values = written(tmp_path, scales, *lead)
    rows, columns = torch.arange(N) // BLOCK, torch.arange(K) // BLOCK
    expected = values * scales[..., rows[:, None], columns]
    (entry,) = with_block_scales(open_checkpoint(tmp_path)).tensors.values()
    assert torch.equal(entry.read(), expected)
    inside = [slice(1, 2)] * len(lead)
    for part in (
        (slice(0, 1), slice(0, K)),
        (slice(BLOCK - 1, BLOCK + 1), slice(5, 2 * BLOCK)),
        (slice(2 * BLOCK + 3, N), slice(K - 1, K)),
    ):
        assert torch.equal(entry.read_slice([*inside, *part]), expected[(*inside, *part)])


def test_a_model_reads_them_as_its_parameters(tmp_path: Path) -> None:
    scales = drawn()
    values = written(tmp_path, scales)
    param = Param(Aval((N, K), torch.bfloat16), Source((NAME,), ((N, K),)))
    (loaded,) = checkpoint.load(open_checkpoint(tmp_path), [param])
    wide = scales.repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)[:, :K]
    assert torch.equal(loaded, (values * wide).bfloat16())


@pytest.mark.parametrize(
    ("scales", "found"),
    [(None, "is nothing"), (torch.ones(2, 2), r"is F32 \[2, 2\]"), (torch.ones(3, 3, dtype=torch.bfloat16), r"is BF16 \[3, 3\]")],
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, scales: torch.Tensor | None, found: str) -> None:
    written(tmp_path, scales)
    with pytest.raises(CheckpointError, match=rf"{NAME} is F8_E4M3 \[320, 383\] and {NAME}_scale_inv {found}; expected F32 \[3, 3\]"):
        with_block_scales(open_checkpoint(tmp_path))
