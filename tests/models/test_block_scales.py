"""models/block_scales.py: FP8 with a scale for each block or channel reads as the floats it stands for, whole and in parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import fp8

from npucompile.graphs import tree
from npucompile.graphs.errors import CheckpointError
from npucompile.graphs.types import Aval, Mesh, Rules
from npucompile.models import checkpoint, registry, sharding_rules
from npucompile.models.block_scales import BLOCK, with_block_scales
from npucompile.models.deployed import CONTRACTED
from npucompile.models.params import Param, Source
from npucompile.models.quant.description import formats_in
from npucompile.models.quant.formats import Formats
from npucompile.models.safetensors_files import open_checkpoint
from npucompile.models.slices import Shard
from npucompile.models.step import Model
from npucompile.tools.quantize.forward import in_formats, logits

N, K = 2 * BLOCK + 64, 3 * BLOCK - 1
NAME = "model.layers.0.w.weight"
FORM = fp8.Form()


def written(directory: Path, scales: torch.Tensor | None, *lead: int, form: fp8.Form = FORM) -> torch.Tensor:
    """Writes a matrix [..., N, K] and its scales, if any; returns the values as float32."""
    values = torch.randn(*lead, N, K, generator=torch.Generator().manual_seed(0)).mul(100).to(torch.float8_e4m3fn)
    tensors = {NAME: values} | ({} if scales is None else {NAME + form.suffix: scales})
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": form.config}))
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


@pytest.mark.parametrize("lead", [(), (2,)])
def test_every_value_is_multiplied_by_the_scale_of_its_channel(tmp_path: Path, lead: tuple[int, ...]) -> None:
    scales = torch.rand(*lead, N, 1, generator=torch.Generator().manual_seed(1)).add(0.1).bfloat16()
    expected = written(tmp_path, scales, *lead, form=fp8.FORMS["glm4"]) * scales.float()
    (entry,) = with_block_scales(open_checkpoint(tmp_path)).tensors.values()
    assert torch.equal(entry.read(), expected)
    inside = [slice(1, 2)] * len(lead)
    for part in ((slice(0, 1), slice(0, K)), (slice(BLOCK - 1, N), slice(5, 2 * BLOCK)), (slice(7, 9), slice(K - 1, K))):
        assert torch.equal(entry.read_slice([*inside, *part]), expected[(*inside, *part)])


def test_a_checkpoint_of_one_scale_a_matrix_is_what_its_library_makes_of_it() -> None:
    """Its static scales of activations are read by nothing."""
    directory = Path(__file__).parent / "quant" / "float8"
    assert formats_in(directory) is None
    plain, stored = load_file(directory / "decompressed.safetensors"), load_file(directory / "model.safetensors")
    entries = with_block_scales(open_checkpoint(directory)).tensors
    assert len(plain) == sum(name.endswith("input_scale") for name in stored) == 14
    assert not any(name.endswith("_scale") for name in entries)
    for name, tensor in plain.items():
        assert torch.equal(entries[name].read().bfloat16(), tensor)
    params = registry.find(directory).model.params(torch.bfloat16)
    loaded = dict(tree.flatten(checkpoint.load(checkpoint.open_checkpoint(directory), params)))
    for path, param in tree.flatten(params):
        assert torch.equal(loaded[path], param.source.join(*(plain.get(name, stored.get(name)) for name in param.source.names)))


def test_a_model_reads_them_as_its_parameters(tmp_path: Path) -> None:
    scales = drawn()
    values = written(tmp_path, scales)
    param = Param(Aval((N, K), torch.bfloat16), Source((NAME,), ((N, K),)))
    (loaded,) = checkpoint.load(open_checkpoint(tmp_path), [param])
    wide = scales.repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)[:, :K]
    assert torch.equal(loaded, (values * wide).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e8m0fnu])
def test_scales_are_numbers_as_they_stand_in_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Each product is rounded once, to float32: numpy's of float64 is exact."""
    scales = (drawn() * 0.01).to(dtype)
    values = written(tmp_path, scales)
    expected = values.double().numpy() * scales.to(torch.float64).numpy()[torch.arange(N)[:, None] // BLOCK, torch.arange(K) // BLOCK]
    (entry,) = with_block_scales(open_checkpoint(tmp_path)).tensors.values()
    assert torch.equal(entry.read(), torch.from_numpy(expected).float())
    assert torch.equal(entry.read_slice([slice(BLOCK - 1, N), slice(5, K)]), torch.from_numpy(expected).float()[BLOCK - 1 :, 5:])


@pytest.mark.parametrize(
    ("scales", "found"),
    [(None, "is nothing"), (torch.ones(2, 2), r"is F32 \[2, 2\]"), (torch.ones(3, 3, dtype=torch.int32), r"is I32 \[3, 3\]")],
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, scales: torch.Tensor | None, found: str) -> None:
    written(tmp_path, scales)
    with pytest.raises(
        CheckpointError, match=rf"{NAME} is F8_E4M3 \[320, 383\] and {NAME}_scale_inv {found}; expected F32 or .* or F8_E8M0 \[3, 3\]"
    ):
        with_block_scales(open_checkpoint(tmp_path))
    expected = r"_scale is F32 \[2\]; expected .* \[3, 3\], a .* or \[320, 1\], a scale for each output channel or \[1\], one for all"
    for name in ("glm4", "llama-autofp8"):
        written(tmp_path, torch.ones(2), form=fp8.FORMS[name])
        with pytest.raises(CheckpointError, match=expected):
            with_block_scales(open_checkpoint(tmp_path))
    # Experts in one tensor have one each, or one for all of them: who wrote it does not say.
    written(tmp_path, torch.ones(1), 2, form=fp8.FORMS["glm4"])
    with pytest.raises(CheckpointError, match=r"a scale for each output channel$"):
        with_block_scales(open_checkpoint(tmp_path))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("name", ["llama", "llama-autofp8"])
def test_every_value_is_multiplied_by_the_one_scale_of_a_matrix(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    scale = torch.full(shape, 0.0123)
    expected = written(tmp_path, scale, form=fp8.FORMS[name]) * scale
    (entry,) = with_block_scales(open_checkpoint(tmp_path)).tensors.values()
    assert torch.equal(entry.read(), expected)
    assert torch.equal(entry.read_slice([slice(7, N), slice(5, K)]), expected[7:, 5:])


@pytest.fixture(params=list(fp8.MODELS))
def published(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[fp8.Published, Path]:
    return fp8.write(tmp_path / "fp8", request.param), tmp_path / "fp8"


@pytest.mark.parametrize("name", [*fp8.MODELS, *fp8.OTHERS])
def test_logits_are_those_of_transformers_on_the_floats(tmp_path: Path, name: str) -> None:
    made, directory = fp8.write(tmp_path, name), tmp_path
    assert formats_in(directory) is None
    model = registry.find(directory).model
    loaded = checkpoint.load(checkpoint.open_checkpoint(directory), model.params(torch.float32))
    ids = made.random.prompt(40)
    ours = logits(model, loaded, torch.tensor([ids], dtype=torch.int32), torch.float32)[0]
    assert (ours - made.random.logits(ids)).abs().max() < 1e-4


FLOAT = tuple((f"*.{name}", "float") for name in ("kv_b_proj", "weights_proj", "eh_proj"))
FORMATS = {
    "floats": Formats(),
    "w8a8": Formats(
        (*FLOAT, ("model.layers.*_proj", "w8a8_dynamic"), ("*.kv_a_proj_with_mqa", "w8a8_dynamic"), ("*.wq_b", "w8a8_dynamic"))
    ),
    "w4a8": Formats((("*.experts.*", "w4a8_dynamic"), ("*.shared_experts.*", "w8a8_dynamic")), group=8),
}


def drafting(directory: Path, formats: Formats, mesh: Mesh, rules: Rules) -> Model:
    """The model with its draft head as that mesh stores it."""
    model = replace(in_formats(registry.find(directory).model, formats), drafting=True)
    shards = tuple((axis, rules.num_shards(axis, mesh)) for axis in CONTRACTED if rules.num_shards(axis, mesh) > 1)
    return replace(model, config=replace(model.config, variant=replace(model.config.variant, shards=shards)))


@pytest.mark.parametrize(
    ("mesh", "expert_parallel"),
    [*(pytest.param(mesh, True, marks=pytest.mark.long) for mesh in ("dp=1", "tp=2")), ("tp=2", False), ("dp=2,tp=2", True)],
)
@pytest.mark.parametrize("form", FORMATS)
def test_ranks_read_their_parts_of_the_floats_and_quantise_them(
    published: tuple[fp8.Published, Path], form: str, mesh: str, expert_parallel: bool
) -> None:
    """The draft head included, a layer behind the others whose copies of embedding and head are not read."""
    made, directory = published
    layout = Mesh.parse(mesh)
    rules = sharding_rules.rules(layout, experts=8, expert_parallel=expert_parallel)
    for dtype in (torch.float32, torch.bfloat16):
        params = drafting(directory, FORMATS[form], layout, rules).params(dtype)
        wanted = fp8.flat(made, params)
        kinds = {tensor.dtype for tensor in wanted.values()}
        assert {"floats": dtype, "w8a8": torch.int8, "w4a8": torch.int32}[form] in kinds
        reader = checkpoint.ParamReader(checkpoint.open_checkpoint(directory), params)
        for rank in range(layout.size):
            shard = Shard(layout, rules, rank)
            read = dict(pair for group in reader.groups for pair in reader.read(group, shard))
            for position, (path, param) in enumerate(tree.flatten(params)):
                assert torch.equal(read[position], wanted[path][rules.local_slice(param.aval, layout, rank)]), (rank, path)


MATRIX = "model.layers.0.self_attn.o_proj.weight"


def removed(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{MATRIX}_scale_inv"]


def of_other_blocks(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{MATRIX}_scale_inv"] = torch.ones(4, 3)


def e5m2(tensors: dict[str, torch.Tensor]) -> None:
    tensors[MATRIX] = tensors[MATRIX].float().to(torch.float8_e5m2)


def block(size: int) -> dict[str, Any]:
    return {"quantization_config": {**fp8.CONFIG, "weight_block_size": [size, size]}}


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({}, removed, rf"{MATRIX} is F8_E4M3 \[200, 152\] and {MATRIX}_scale_inv is nothing; expected F32 or .* or F8_E8M0 \[2, 2\]"),
        ({}, of_other_blocks, r"_scale_inv is F32 \[4, 3\]; expected F32 or .* \[2, 2\], a scale for each block of 128 by 128"),
        ({}, e5m2, rf"tensor {MATRIX} \(F8_E5M2; expected F32 or BF16 or F16 or F64\) has the wrong dtype"),
        (
            {"quantization_config": None},
            None,
            r"is F8_E4M3, and config.json has no quantization_config of quant_method 'fp8' or 'compressed-tensors'; legal is",
        ),
        (
            {"quantization_config": {**fp8.CONFIG, "weight_block_size": [64, 64]}},
            None,
            r"weight_block_size is \[64, 64\]; legal is \[128, 128\]",
        ),
        (
            {"quantization_config": {**fp8.CONFIG, "weight_block_size": None}},
            None,
            r"_scale is nothing; expected .* or \[1\], one for all",
        ),
        ({"quantization_config": {**fp8.CONFIG, "activation_scheme": "none"}}, None, r"is 'none'; legal is 'dynamic' or 'static'"),
        ({"quantization_config": {**fp8.CONFIG, "fmt": "e5m2"}}, None, r"fmt is 'e5m2'; legal is 'e4m3' or 'float8_e4m3fn'"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused_by_name(tmp_path: Path, config: Any, change: Any, message: str) -> None:
    fp8.write(tmp_path, "v32", **config)
    if change:
        tensors = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        for file in tmp_path.glob("model*-of-*"):
            file.unlink()
        (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=message):
        checkpoint.ParamReader(checkpoint.open_checkpoint(tmp_path), registry.find(tmp_path).model.params(torch.float32))
