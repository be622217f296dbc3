"""models/quant/leaves.py: the tensors of a part of a matrix are the parts of its tensors."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs.errors import CheckpointError
from npucompile.models.quant import leaves
from npucompile.models.quant.leaves import DeclaredMatrix

R = torch.Generator().manual_seed(0)
FORMS = [("w8a8_dynamic", 0), ("w4a8_dynamic", 0), ("w4a8_dynamic", 4), ("w4a16", 0), ("w4a16", 4)]


@pytest.mark.parametrize(("form", "group"), FORMS)
def test_a_share_of_the_contraction_has_its_share_of_the_parts(form: str, group: int) -> None:
    matrix = DeclaredMatrix((8, 16), (None, "k"), 0, True, 2)
    values = torch.randint(-7, 8, (8, 16), generator=R, dtype=torch.int8)
    others = [torch.rand(8, 1, generator=R) + 0.1, *([torch.rand(8, 4, generator=R) + 0.1] if group else [])]
    # Those of compressed-tensors have no scale of a channel beside those of groups.
    first = others[0] if form != "w4a16" or not group else others.pop(0)
    names = leaves.avals(matrix, form, group)
    whole = dict(zip(names, leaves.from_integers(matrix, form, group, values, *others), strict=True))
    for part in range(2):
        own = [other if other is first else other[:, 2 * part : 2 * part + 2] for other in others]
        mine = dict(zip(names, leaves.from_integers(matrix, form, group, values[:, 8 * part : 8 * part + 8], *own), strict=True))
        for name, tensor in mine.items():
            size = whole[name].shape[0] // 2
            assert torch.equal(tensor, whole[name][part * size : (part + 1) * size]), name


@pytest.mark.parametrize(("form", "group"), FORMS)
def test_declared_values_are_those_that_are_made(form: str, group: int) -> None:
    for matrix in (DeclaredMatrix((24, 16), ("n", None), 0, False), DeclaredMatrix((3, 2, 8, 16), ("e", None, "f", None), 1, False)):
        made = leaves.from_floats(matrix, form, group, torch.randn(matrix.shape, generator=R))
        for tensor, aval in zip(made, leaves.avals(matrix, form, group).values(), strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (aval.shape, aval.dtype)


def test_groups_that_do_not_fill_a_part_are_refused() -> None:
    with pytest.raises(CheckpointError, match="groups of 6 weights for a contraction of 16 in 2 parts; legal are"):
        DeclaredMatrix((8, 16), (None, "k"), 0, True, 2).groups(6)
