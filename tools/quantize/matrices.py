"""Which matrices of a float checkpoint become integers, and in which format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from math import prod

import torch

from ...graphs import tree
from ...graphs.errors import CheckpointError, SpecError
from ...graphs.quantise import NIBBLES
from ...models.checkpoint import PER_EXPERT, CheckpointFiles, ParamReader, found_names
from ...models.decoder import HEAD
from ...models.params import Param
from ...models.quant.declare import ROLES
from ...models.quant.description import canonical
from ...models.quant.formats import FLOAT, INT4, W4A8_DYNAMIC, W4A16, W8A8, W8A8_DYNAMIC, Formats, matrix_name
from ...models.quant.parts import apart
from ...models.quant.recipes import formats_of_scheme
from ...models.safetensors_files import TensorEntry
from ...models.step import Model
from .layout import SCALE_BIAS_PARTS


@dataclass(frozen=True)
class Matrix:
    """A matrix [N, K] of a checkpoint, output channels first, that becomes integers.

    Attributes:
        stem: what the names of its tensors begin with where they are written.
        group_name: its name in reports, as sources of parameters have it; the experts of a layer share one.
        param: path of the parameter that it is part of; matrices that are multiplied as one share it.
        form: of models/quant/formats.py.
        row: whether ranks share its contraction.
        entry, region: where its floats are.
        shared: whether these are another parameter's too, which stays float: the embedding's.
    """

    stem: str
    group_name: str
    param: str
    form: str
    row: bool
    entry: TensorEntry
    region: tuple[slice, ...]
    shared: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = (part.stop - part.start for part in self.region[-2:])
        return n, k

    @property
    def nbytes(self) -> int:
        """Bytes of its values on disk."""
        return self.entry.nbytes * prod(self.shape) // prod(self.entry.shape)

    def read(self) -> torch.Tensor:
        """Its floats [N, K], in the checkpoint's dtype; of FP8 in float32."""
        return self.entry.read_slice(self.region).view(self.shape)


def formats_for(scheme: str, model: str, *, keep: tuple[str, ...] = (), static: tuple[str, ...] = (), group: int | None = None) -> Formats:
    """The formats of a scheme, by the recipe of that model.

    Args:
        keep: patterns of matrices that stay float.
        static: patterns of matrices whose activations get one scale for all tokens, except those that the recipe first of all leaves
            float: a draft head.
        group: weights of an output channel that share an int4 scale; 0: all; None: as many as the recipe says.

    Raises:
        SpecError: groups in a scheme without int4, or static scales of activations that stay float.
    """
    formats = formats_of_scheme(scheme, model)
    forms = {form for _, form in formats.rules}
    if group and not forms & set(INT4):
        raise SpecError(f"--group {group} with --scheme {scheme}: int4 matrices have groups; legal are --scheme w4a8 and w4a16")
    if static and W4A16 in forms:
        raise SpecError(
            f"--static {static[0]} with --scheme {scheme}: its activations stay what they are; legal are --scheme w8a8 and w4a8"
        )
    floats = tuple(takewhile(lambda rule: rule[1] == FLOAT, formats.rules))
    rules = (*((pattern, FLOAT) for pattern in keep), *floats, *((pattern, W8A8) for pattern in static), *formats.rules[len(floats) :])
    return Formats(rules, group=formats.group if group is None else group)


def without_static(formats: Formats) -> Formats:
    """The same with a scale for each token where one for all was meant, which needs a calibration."""
    return replace(formats, rules=tuple((pattern, W8A8_DYNAMIC if form == W8A8 else form) for pattern, form in formats.rules))


def checked_model(model: Model, checkpoint: CheckpointFiles) -> Model:
    """The model with its draft head if the checkpoint has one.

    Raises:
        CheckpointError: a tensor is missing, misshapen, unused, or not float.
    """
    names = {canonical(name) for name in checkpoint.tensors}
    both = {drafting: replace(model, drafting=drafting).params(torch.float32) for drafting in (False, True)}
    own, all_names = ({name for _, param in tree.flatten(params) for name in param.source.names} for params in both.values())
    found = replace(model, drafting=bool((all_names - own) & names))
    ParamReader(checkpoint, found.params(torch.float32))
    return found


def select(model: Model, checkpoint: CheckpointFiles, formats: Formats) -> list[Matrix]:
    """The matrices of a checkpoint that do not stay float, in the order of the model's parameters.

    Args:
        model: what `checked_model` gave.

    Raises:
        SpecError: a matrix cannot have its format.
        CheckpointError: experts of a layer have different formats, or a shape does not suit the format.
    """
    table = {canonical(name): entry for name, entry in checkpoint.tensors.items()}
    params: list[tuple[str, Param]] = tree.flatten(model.params(torch.float32))
    # A head that shares the embedding's floats is a parameter only where it has a format of its own.
    formatted = replace(model, config=replace(model.config, variant=replace(model.config.variant, formats=formats)))
    params += [(path, param) for path, param in tree.flatten(formatted.matrices(torch.float32)) if param.source.instead]
    matrices: list[Matrix] = []
    for path, param in [(path, part) for path, whole in params for part in apart(whole, formats)]:
        form = formats.of(param.source.names)
        # A bias stays what it is beside a matrix of any format, whose pattern its name may fit.
        if form == FLOAT or all(name.endswith(".bias") for name in param.source.names):
            continue
        if param.role not in ROLES:
            raise SpecError(f"{param.source.names[0]}: the format is {form}; it is no matrix of a product, legal is {FLOAT}")
        if ROLES[param.role][0] and form == W8A8:
            raise SpecError(f"{param.source.names[0]}: the format is {form}; experts have a scale for each token, legal is {W8A8_DYNAMIC}")
        if param.biased and form == W8A8:
            raise SpecError(
                f"{param.source.names[0]}: the format is {form}, and it has a bias, which scales for all tokens would absorb; legal are "
                f"{W8A8_DYNAMIC} and {FLOAT}"
            )
        matrices.extend(_matrices(path, param, form, table))
    for matrix in matrices:
        _check_shape(matrix, formats.group)
    return matrices


def check_patterns(model: Model, patterns: Iterable[str]) -> None:
    """Refuses a pattern that is of no matrix of a model.

    Raises:
        SpecError: naming it.
    """
    params = tree.flatten(model.params(torch.float32))
    # The head is none of its own where it shares the embedding's floats, but becomes one where it is quantised.
    names = [*(matrix_name(name) for _, param in params if param.role in ROLES for name in param.source.names), matrix_name(HEAD)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SpecError(f"no matrix is named {pattern!r}; legal are patterns of names such as {', '.join(names[:3])}")


def _matrices(path: str, param: Param, form: str, table: Mapping[str, TensorEntry]) -> Iterator[Matrix]:
    lead, row = ROLES[param.role]
    found = found_names(param.source, table)
    for name, at, shape in zip(param.source.names, found, param.source.shapes, strict=True):
        group_name = matrix_name(name)
        if not lead:
            entry, shared = table[at], at != name
            stem = group_name if shared else matrix_name(entry.name)
            yield Matrix(stem, group_name, path, form, row, entry, tuple(slice(0, size) for size in shape), shared)
            continue
        prefix, _, fused = name.rpartition(".")
        parts = PER_EXPERT[fused]
        count, rows = shape[0], shape[1] // len(parts)
        for expert in range(count):
            for i, part in enumerate(parts):
                if name in table:
                    entry = table[name]
                    stem = f"{entry.name.rpartition('.')[0]}.{expert}.{part}"
                    region: tuple[slice, ...] = (slice(expert, expert + 1), slice(i * rows, (i + 1) * rows), slice(0, shape[2]))
                else:
                    entry = table[f"{prefix}.{expert}.{part}.weight"]
                    stem, region = matrix_name(entry.name), (slice(0, rows), slice(0, shape[2]))
                yield Matrix(stem, group_name, path, form, row, entry, region)


def _check_shape(matrix: Matrix, group: int) -> None:
    if matrix.form not in INT4:
        return
    n, k = matrix.shape
    if matrix.form == W4A16 and n % NIBBLES:
        raise CheckpointError(f"{matrix.stem} has {n} output channels; kernels read {NIBBLES} int4 at once, legal are multiples of that")
    if n % 2:
        raise CheckpointError(f"{matrix.stem} has {n} output channels; two int4 share a byte, legal are even numbers")
    if group and k % group:
        raise CheckpointError(f"{matrix.stem} has a contraction of {k}, which groups of {group} do not fill; legal are divisors of {k}")
    if matrix.form == W4A8_DYNAMIC and matrix.row and k % SCALE_BIAS_PARTS:
        raise CheckpointError(f"{matrix.stem} has a contraction of {k}; of an int4 matrix legal are multiples of {SCALE_BIAS_PARTS}")
