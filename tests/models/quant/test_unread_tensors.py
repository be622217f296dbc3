"""models/quant/unread_tensors.py: what a quantised checkpoint holds is read, or is not for a reason; a damaged one is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import modelslim

from npucompile.graphs.errors import NpucompileError
from npucompile.models import registry
from npucompile.models.checkpoint import ParamReader, open_checkpoint
from npucompile.models.quant.declare import stored
from npucompile.models.quant.description import DESCRIPTION, formats_in
from npucompile.models.quant.unread_tensors import reason
from npucompile.models.variant import Variant

Q, DOWN, EXPERT = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.experts.1.gate_proj"
Change = Callable[[Path], None]


def opened(directory: Path) -> None:
    """Everything that happens before a parameter is read."""
    model, formats = registry.find(directory).model, formats_in(directory)
    assert formats is not None
    variant = Variant(formats=formats, grouped=model.config.num_experts > 0, shards=(("q_heads", 2),))
    ParamReader(open_checkpoint(directory), stored(model.family.abstract_params(model.config, torch.bfloat16), variant))


def weights(**tensors: torch.Tensor | None) -> Change:
    """Replaces tensors, of which dots are two underscores; None removes one."""

    def change(directory: Path) -> None:
        (file,) = directory.glob("*.safetensors")
        held = load_file(file) | {name.replace("__", "."): tensor for name, tensor in tensors.items() if tensor is not None}
        for name in (name.replace("__", ".") for name, tensor in tensors.items() if tensor is None):
            del held[name]
        save_file(held, file)

    return change


def described(**values: Any) -> Change:
    """Replaces values of the description, of whose names dots are two underscores."""

    def change(directory: Path) -> None:
        path = directory / DESCRIPTION
        path.write_text(json.dumps(json.loads(path.read_text()) | {name.replace("__", "."): value for name, value in values.items()}))

    return change


def truncated(directory: Path) -> None:
    (file,) = directory.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def indexed(*stems: str) -> Change:
    """Writes an index under each of these names, as ModelSlim does beside one file, too."""

    def change(directory: Path) -> None:
        (file,) = directory.glob("*.safetensors")
        text = json.dumps({"weight_map": dict.fromkeys(load_file(file), file.name)})
        for stem in stems:
            (directory / f"{stem}.safetensors.index.json").write_text(text)

    return change


def without_a_shard(stem: str) -> Change:
    def change(directory: Path) -> None:
        indexed(stem)(directory)
        next(directory.glob("*.safetensors")).unlink()

    return change


def named(matrix: str, kind: str) -> str:
    return f"{matrix}.{kind}".replace(".", "__")


DYNAMIC, STATIC, INT4, GROUPS, SHIFTED = "dense_w8a8_dynamic", "dense_w8a8_static", "moe_w4a8_smooth", "moe_w4a8_group", "dense_w8a8_mix_m4"


@pytest.mark.parametrize("name", [*modelslim.NAMES, modelslim.LATENT])
def test_every_tensor_is_read_or_is_not_for_a_reason(name: str) -> None:
    opened(modelslim.FIXTURES / name)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        *(
            (source, without_a_shard(stem), rf"00001\.safetensors: no such file, though {stem}\.safetensors\.index\.json names it")
            for source, stem in ((DYNAMIC, "quant_model_weights"), (SHIFTED, "quant_model_weight_w8a8_mix"))
        ),
        (DYNAMIC, truncated, r"truncated or corrupt safetensors: .*; the file has \d+ bytes"),
        (
            DYNAMIC,
            indexed("quant_model_weight_w8a8", "quant_model_weights"),
            r"holds quant_model_weight_w8a8\.\S+, quant_model_weights\.\S+; legal is one index",
        ),
        (DYNAMIC, described(version="2.0.0"), "version is '2.0.0'; legal is 1.0.0"),
        (INT4, described(version=None), r"experts\.\d+\.\S+ is W4A8_DYNAMIC, and there is no version; legal for int4 is version 1\.0\.0"),
        (
            STATIC,
            described(**{named(DOWN, "weight"): "W8A8_DYNAMIC"}),
            rf"tensor {DOWN}\.weight \(BF16; expected I8\) has the wrong dtype$",
        ),
        (DYNAMIC, described(**{named(DOWN, "weight"): "FLOAT"}), rf"{DOWN}\.weight \(I8; expected F32 or BF16 .*\) has the wrong dtype"),
        (
            DYNAMIC,
            described(**{named(Q, "weight"): "W8A8"}),
            rf"tensor {Q}\.deq_scale \(expected \[64\]\) is missing; so with 3 more",
        ),
        (INT4, described(**{named(EXPERT, "weight"): "W8A8_DYNAMIC"}), "experts of a layer are one matrix and must have one type"),
        (GROUPS, described(group_size=24), "groups of 24 weights for a contraction of 64"),
        (GROUPS, described(group_size=64), "groups of 64 weights for a contraction of 64 in 2 parts"),
        (GROUPS, described(group_size=16), r"weight_scale_second \(found \[64, 2\], expected \[64, 4\]\) has a wrong shape"),
        (DYNAMIC, weights(**{named(Q, "weight_scale"): None}), rf"tensor {Q}\.weight_scale \(expected \[64, 1\]\) is missing$"),
        (
            DYNAMIC,
            weights(**{named(Q, "weight_offset"): torch.tensor([[0.0]] * 63 + [[3.0]])}),
            rf"tensor {Q}\.weight_offset has values up to 3 and is not read; legal are zeros only",
        ),
        (DYNAMIC, weights(**{named(Q, "bias"): torch.ones(64)}), rf"tensor {Q}\.bias has values up to 1 and is not read"),
        (DYNAMIC, weights(**{named(Q, "heads_rotation"): torch.ones(4)}), rf"tensor {Q}\.heads_rotation is not part of the model"),
        (DYNAMIC, described(**{named(Q, "bias"): "FLOAT"}), rf"tensor {Q}\.bias is missing; {DESCRIPTION} names it"),
        (
            SHIFTED,
            weights(**{named(Q, "bias"): torch.zeros(64)}),
            "q_proj.weight has no bias, .*k_proj.weight has a bias, .*all or none",
        ),
        (
            SHIFTED,
            lambda directory: (
                described(**{named(DOWN, "bias"): "FLOAT"})(directory),
                weights(**{named(DOWN, "bias"): torch.ones(64)})(directory),
            ),
            rf"{DOWN}\.weight: has a bias; one is read of norms and of matrices",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_a_parameter_is_read(tmp_path: Path, name: str, change: Change, message: str) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(modelslim.FIXTURES / name, directory)
    change(directory)
    with pytest.raises(NpucompileError, match=message):
        opened(directory)


def test_reasons_hold_only_where_what_they_name_is_read() -> None:
    dynamic, static = {f"{Q}.weight", f"{Q}.weight_scale"}, {f"{Q}.weight", f"{Q}.quant_bias"}
    assert reason(f"{Q}.deq_scale", dynamic)
    assert reason(f"{Q}.deq_scale", static) is None
    assert reason(f"{Q}.weight_scale", static)
    assert reason(f"{Q}.bias", static)
    assert reason(f"{Q}.scale_bias", set()) is None
    assert reason("model.layers.0.input_layernorm.module.weight", {"model.layers.0.input_layernorm.weight"})
