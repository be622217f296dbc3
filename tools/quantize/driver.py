"""Writes the quantised checkpoint of a float one, or of one in FP8, matrix by matrix."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ...graphs import tree
from ...graphs.errors import CheckpointError, SpecError
from ...models.block_scales import BlockScaledEntry, with_block_scales
from ...models.checkpoint import CheckpointFiles, open_checkpoint
from ...models.quant.description import DESCRIPTION, formats_in
from ...models.quant.formats import W4A8_DYNAMIC, W4A16, W8A8, W8A8_DYNAMIC, Formats, matrix_name
from ...models.quant.quantization_config import FIELD, method_in, settings_of
from ...models.registry import ModelSource, published_name
from ...models.safetensors_files import DTYPES, STORED_DTYPES, TensorEntry
from ...models.step import Model
from ..progress import Progress
from . import packed
from .calibrate import MOST_WINDOWS, WINDOW_TOKENS, calibrated
from .forward import loaded, read_text, token_ids, windows
from .layout import TYPES, Activations, quantised, rounded
from .matrices import Matrix, check_patterns, checked_model, formats_for, select, without_static
from .report import ErrorSums, MatrixError
from .shards import SHARD_BYTES, ShardWriter

TIED = "tie_word_embeddings"
STEM = "quant_model_weights"
WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
"""Endings of files that are not copied: weights in any format."""


@dataclass(frozen=True)
class QuantizeSettings:
    """The options of `npucompile quantize`.

    Attributes:
        scheme: of models/quant/recipes.py.
        keep: patterns of matrices that stay float.
        static: patterns of matrices whose activations get one scale for all tokens.
        calibrate: a text to find those scales with.
        group: weights of an output channel that share an int4 scale; 0: all; None: as many as the recipe says.
        float_draft: whether the draft head stays float, whatever the recipe says.
    """

    scheme: str
    keep: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    calibrate: Path | None = None
    group: int | None = None
    float_draft: bool = False


def quantize(
    source: ModelSource, out: Path, settings: QuantizeSettings, progress: Progress, *, shard_bytes: int = SHARD_BYTES
) -> list[MatrixError]:
    """Writes `out`, which appears whole or not at all; returns the error of each matrix, the worst first.

    Args:
        source: a model with a checkpoint of floats, or of FP8 and scales: their products are what is rounded, in float32.
        out: does not exist, or is empty.
        shard_bytes: most bytes of a file.

    Raises:
        SpecError: an option is not legal, or the model has no weights.
        CheckpointError: the checkpoint is quantised already, or does not fit the model.
    """
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SpecError(f"{out} exists; legal is a new or empty directory")
    checkpoint, floats = _open_float(source), _dtype(source)
    model, formats = checked_model(source.model, checkpoint), _formats(source, settings, progress)
    check_patterns(model, (*settings.keep, *settings.static))
    formats = _with_draft(model, formats, settings)
    matrices = select(model, checkpoint, formats)
    if not matrices:
        raise SpecError(f"--scheme {settings.scheme} leaves every matrix of {source.name} float; legal is a scheme that quantises one")
    if settings.scheme == "w4a8" and not any(matrix.form == W4A8_DYNAMIC for matrix in matrices):
        progress.say(f"no matrix of {source.name} becomes int4: recipes give int4 to experts only, as serving stacks read it")
    activations = _activations(source, model, matrices, settings, progress)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        errors = _write(partial, checkpoint, matrices, formats, activations, floats, progress, shard_bytes)
        _copy_others(checkpoint.directory, partial, _configured(checkpoint, matrices, formats.group))
        # Files may say that the head is the embedding beside another one (models/tied_head.py); others would believe them.
        if any(matrix.shared for matrix in matrices) or not model.config.tie_word_embeddings:
            _untie(partial / "config.json")
        if source.model.has_draft_head and not model.drafting:
            _undeclare(partial / "config.json", source.model, progress)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return errors


def _open_float(source: ModelSource) -> CheckpointFiles:
    directory = source.checkpoint_dir
    if directory is None:
        raise SpecError(f"{source.name} is a set of sizes without weights; legal is a checkpoint directory or a bundled model")
    if (directory / DESCRIPTION).exists():
        raise CheckpointError(f"{directory} is quantised already: it holds {DESCRIPTION}; legal is a float checkpoint")
    if method := method_in(directory) if formats_in(directory) else None:
        raise CheckpointError(
            f"{directory} is quantised already: config.json has {FIELD} of quant_method {method!r}; "
            "legal are float checkpoints, and those in FP8"
        )
    return with_block_scales(open_checkpoint(directory))


def _dtype(source: ModelSource) -> torch.dtype:
    """What a model computes in by its config.json, bfloat16 where that does not say: FP8 that stays float is written in it."""
    values = json.loads(source.text)
    nested = values.get("text_config") or {}
    fields = [each.get(name) for each in (values, nested) for name in ("dtype", "torch_dtype")]
    name = next(filter(None, fields), "bfloat16")
    legal = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if name not in legal:
        raise CheckpointError(f"{source.checkpoint_dir}: config.json: dtype is {name!r}; legal are {', '.join(legal)}")
    return legal[name]


def _with_draft(model: Model, formats: Formats, settings: QuantizeSettings) -> Formats:
    """The formats with those of a draft head, which a calibration does not run: float if asked, and never static."""
    if not model.drafting:
        if settings.float_draft:
            raise SpecError(f"--float-draft: {model.name} has no draft head in its checkpoint; legal is to leave the option out")
        return formats
    own = model.params(torch.float32)[model.family.draft_key]
    names = [name for _, param in tree.flatten(own) for name in param.source.names]
    if settings.float_draft:
        return formats.floats_first(*map(matrix_name, names))
    static = [matrix_name(name) for name in names if formats.of([name]) == W8A8]
    return replace(formats, rules=(*((name, W8A8_DYNAMIC) for name in static), *formats.rules))


def _formats(source: ModelSource, settings: QuantizeSettings, progress: Progress) -> Formats:
    formats = formats_for(settings.scheme, published_name(source), keep=settings.keep, static=settings.static, group=settings.group)
    static = any(form == W8A8 for _, form in formats.rules)
    if settings.calibrate and not static:
        progress.say(
            f"{settings.calibrate} is not read: no matrix of {source.name} has one scale of activations for all tokens "
            f"in {settings.scheme}; --static PATTERN gives it one"
        )
    if settings.calibrate or not static:
        return formats
    if settings.static:
        raise SpecError(
            f"--static {settings.static[0]}: one scale for all tokens needs a text to find it with; legal is --calibrate TEXT too"
        )
    progress.say("the recipe's static scales of activations need --calibrate TEXT; without it each token gets its own")
    return without_static(formats)


def _activations(
    source: ModelSource, model: Model, matrices: Sequence[Matrix], settings: QuantizeSettings, progress: Progress
) -> Mapping[str, Activations]:
    """Of each parameter of static matrices."""
    wanted = {matrix.param: matrix.stem for matrix in matrices if matrix.form == W8A8}
    if settings.calibrate is None or not wanted:
        return {}
    batches = list(windows(token_ids(source, read_text(settings.calibrate)), WINDOW_TOKENS))[:MOST_WINDOWS]
    plain, params = loaded(replace(source, model=replace(model, drafting=False)), torch.float32)
    return calibrated(plain, params, batches, wanted, progress)


@dataclass(frozen=True)
class _TensorWork:
    """A tensor of the float checkpoint, and the matrices that are made of it; none if it stays float.

    Attributes:
        floats: what the model computes in; None where the checkpoint's own dtype says it.
    """

    entry: TensorEntry
    matrices: tuple[Matrix, ...]
    floats: torch.dtype | None

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.floats or STORED_DTYPES[self.entry.dtype]

    @property
    def stays(self) -> bool:
        """Whether it stays float, if only for another parameter."""
        return not self.matrices or any(matrix.shared for matrix in self.matrices)

    @property
    def announced(self) -> dict[str, torch.Tensor]:
        """What is written of one that stays float."""
        return {self.entry.name: torch.empty(self.entry.shape, dtype=self.dtype, device="meta")}

    def write_float(self, writer: ShardWriter) -> None:
        """Copies its bytes; of FP8 multiplies values by their scales."""
        if self.floats is None:
            writer.copy(self.entry)
        else:
            writer.write(self.entry.name, self.entry.read().to(self.floats))


def _jobs(checkpoint: CheckpointFiles, matrices: Sequence[Matrix], floats: torch.dtype) -> Iterator[_TensorWork]:
    """In the order of the checkpoint.

    Args:
        floats: what FP8 that stays float is written in.
    """
    by_entry: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        by_entry.setdefault(matrix.entry.name, []).append(matrix)
    for name, entry in checkpoint.tensors.items():
        yield _TensorWork(entry, tuple(by_entry.get(name, ())), floats if isinstance(entry, BlockScaledEntry) else None)


def _write(
    directory: Path,
    checkpoint: CheckpointFiles,
    matrices: Sequence[Matrix],
    formats: Formats,
    activations: Mapping[str, Activations],
    floats: torch.dtype,
    progress: Progress,
    shard_bytes: int,
) -> list[MatrixError]:
    jobs = list(_jobs(checkpoint, matrices, floats))
    # What is in a file together: the tensors of a matrix, or one that stays float.
    groups: list[tuple[str, dict[str, torch.Tensor]]] = []
    for job in jobs:
        for matrix in job.matrices:
            tensors = _announced(matrix.shape, job.dtype, matrix.form, matrix.row, formats.group)
            groups.append((TYPES[matrix.form], {f"{matrix.stem}.{kind}": tensor for kind, tensor in tensors.items()}))
        groups += [("FLOAT", job.announced)] if job.stays else []
    stem = packed.STEM if _is_packed(matrices) else STEM
    writer, sums = ShardWriter(directory, stem, [tensors for _, tensors in groups], shard_bytes), ErrorSums()
    with progress.byte_bar("quantising", checkpoint.nbytes) as bar:
        for job in jobs:
            for matrix in job.matrices:
                _write_matrix(writer, matrix, job.dtype, formats.group, activations.get(matrix.param), sums)
                bar.add(matrix.nbytes)
            if job.stays:
                job.write_float(writer)
                bar.add(0 if job.matrices else job.entry.nbytes)
    writer.finish()
    if not _is_packed(matrices):
        types = {name: kind for kind, tensors in groups for name in tensors}
        (directory / DESCRIPTION).write_text(json.dumps(_description(types, formats, matrices), indent=2) + "\n", encoding="utf-8")
    return sums.errors()


def _is_packed(matrices: Sequence[Matrix]) -> bool:
    """Whether the checkpoint is compressed-tensors' `pack-quantized`, which has no matrices of other integers; else it is ModelSlim's."""
    return any(matrix.form == W4A16 for matrix in matrices)


def _configured(checkpoint: CheckpointFiles, matrices: Sequence[Matrix], group: int) -> dict[str, Any] | None:
    """What config.json says of the quantisation, where it is what says it."""
    rounded_entries = {matrix.entry.name for matrix in matrices}
    floats = [entry for name, entry in checkpoint.tensors.items() if name not in rounded_entries]
    return packed.quantization_config(group, floats) if _is_packed(matrices) else None


def _write_matrix(
    writer: ShardWriter, matrix: Matrix, dtype: torch.dtype, group: int, activations: Activations | None, sums: ErrorSums
) -> None:
    rounding = partial(quantised, form=matrix.form, row=matrix.row, group=group, activations=activations, dtype=dtype)
    tensors, change, norm = rounded(matrix.read(), rounding)
    for kind, tensor in tensors.items():
        writer.write(f"{matrix.stem}.{kind}", tensor)
    sums.add(matrix.group_name, matrix.form, change, norm, matrix.nbytes, sum(tensor.nbytes for tensor in tensors.values()))


@cache
def _announced(shape: tuple[int, int], dtype: torch.dtype, form: str, row: bool, group: int) -> Mapping[str, torch.Tensor]:
    """`meta` tensors of what is written of a matrix of a model that computes in that dtype; of all experts once."""
    values = torch.empty(shape, dtype=dtype, device="meta")
    return quantised(values, form, row=row, group=group, activations=Activations(1.0, 0.0)).tensors


def _description(types: Mapping[str, str], formats: Formats, matrices: Sequence[Matrix]) -> dict[str, Any]:
    """As ModelSlim 26.1.0 writes it; it never calls a model W4A8_DYNAMIC whose other matrices have another type."""
    own = {TYPES[matrix.form] for matrix in matrices}
    label = next((name for name in ("W8A8", "W8A8_DYNAMIC") if name in own), "W4A8_DYNAMIC")
    return {**types, "version": "1.0.0", "model_quant_type": label, "metadata": {}, "group_size": formats.group, "optional": {}}


def _untie(config: Path) -> None:
    """Says that the head has tensors of its own."""
    values = json.loads(config.read_text(encoding="utf-8"))
    for each in (values, values.get("text_config") or {}):
        if TIED in each or each is values:
            each[TIED] = False
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _undeclare(config: Path, model: Model, progress: Progress) -> None:
    """Says that there is no draft head, where the checkpoint has no tensor of the one that its configuration declares."""
    fields = model.family.draft_head.declared_by if model.family.draft_head else ()
    values = json.loads(config.read_text(encoding="utf-8"))
    places = (values.get("text_config") or {}, values)
    found = [(each, name) for name in fields for each in places if name in each] or [(values, name) for name in fields[:1]]
    for each, name in found:
        each[name] = 0
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    said = f"; what is written says {', '.join(f'{name} 0' for _, name in found)}" if found else ""
    progress.say(f"no draft head: the checkpoint has no tensor of the one that its configuration declares{said}")


def _copy_others(source: Path, directory: Path, quantization: dict[str, Any] | None) -> None:
    """Configuration and tokenizer, as they were but for what config.json says of quantisation: nothing any more of FP8."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_FILES) and not file.name.startswith("."):
            shutil.copyfile(file, directory / file.name)
    config = directory / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    if settings_of(values) or quantization:
        for each in (values, values.get("text_config") or {}):
            each.pop(FIELD, None)
        values |= {FIELD: quantization} if quantization else {}
        config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
