"""The tensors of a checkpoint directory: where each lies in its safetensors files, and its bytes on request."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..graphs.errors import CheckpointError, ConfigError
from .config import read_json
from .directories import contents, dangling, missing

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMES = ((SINGLE, INDEX), ("quant_model_weight*.safetensors", "quant_model_weight*.safetensors.index.json"))
"""Names of a checkpoint's one file, and of the index of its several: of transformers, and of ModelSlim.

ModelSlim 26.1.0 writes `quant_model_weights`, and by recipes of its older form `quant_model_weight_` and a scheme."""

LARGEST_CONTENT_DIGEST_BYTES = 2 * 1024**3
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
"""Dtypes that are numbers as they stand, by their code in a file; all others need scales or are no weights."""

STORED_DTYPES = {
    **DTYPES,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Those and the dtypes of quantised parameters."""

_MIB = 1024**2
_SAMPLES, _SAMPLE_BYTES = 64, 64 * 1024


@dataclass(frozen=True)
class TensorEntry:
    """One tensor on disk.

    Attributes:
        name: its name in the file.
        file: the safetensors file that holds it.
        dtype: the format's code, e.g. `BF16`.
        begin, end: byte range in the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.end - self.begin

    def read(self) -> torch.Tensor:
        """The tensor, in memory of its own.

        Raises:
            CheckpointError: the file changed since its header was read.
        """
        return self.read_slice(tuple(slice(0, size) for size in self.shape))

    def read_slice(self, region: Sequence[slice]) -> torch.Tensor:
        """A part of the tensor, in memory of its own; nothing else of it is read.

        Args:
            region: of each dimension the part that is read; steps are 1.

        Raises:
            CheckpointError: the file changed since its header was read.
        """
        bounds = [part.indices(size)[:2] for part, size in zip(region, self.shape, strict=True)]
        tensor = torch.empty([end - begin for begin, end in bounds], dtype=STORED_DTYPES[self.dtype])
        self.read_into(tensor, region)
        return tensor

    def read_into(self, target: torch.Tensor, region: Sequence[slice] | None = None) -> None:
        """Reads the tensor, or a part of it, into a contiguous one of that shape and its dtype, without a copy in between.

        Mapping the file would be shorter, but mapped pages count as resident memory until the kernel takes them back.

        Raises:
            CheckpointError: the file changed since its header was read.
        """
        buffer, item_bytes = bytes_of(target), target.element_size()
        try:
            with self.file.open("rb", buffering=0) as stream:
                for first, count in _runs(self.shape, region or [slice(None)] * len(self.shape)):
                    run, buffer = buffer[: count * item_bytes], buffer[count * item_bytes :]
                    self._read_run(stream.fileno(), self.begin + first * item_bytes, run)
        except OSError as error:
            raise CheckpointError(f"{self.file}: cannot be read any more: {error}") from None

    def _read_run(self, descriptor: int, offset: int, run: memoryview) -> None:
        while run and (count := os.preadv(descriptor, [run], offset)):
            run, offset = run[count:], offset + count
        if run:
            lacking = self.end - offset
            raise CheckpointError(f"{self.file}: ends {lacking} bytes before the end of {self.name}; it was longer when it was opened")


@dataclass(frozen=True)
class CheckpointFiles:
    """The contents of a checkpoint directory, known from file headers; no tensor is in memory.

    Attributes:
        files: safetensors files, sorted by name.
        tensors: every tensor by its name on disk.
        others: directories of further checkpoints whose tensors are among them, by what the names of these begin with.
    """

    directory: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]
    others: Mapping[str, Path] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())


def open_checkpoint(directory: str | Path) -> CheckpointFiles:
    """Reads the headers of the shards that an index lists, or of the one file of a checkpoint without one (`NAMES`).

    Raises:
        CheckpointError: naming the file that is absent, truncated or corrupt, or the tensor that the index places wrongly.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory; a checkpoint is a directory with {SINGLE}")
    index, single = _index_or_single(directory)
    if index is None:
        return CheckpointFiles(directory, (single,), entries_of(single))
    weight_map = _weight_map(index)
    listed = set(weight_map.values())
    if index.name == INDEX and SINGLE not in listed and (directory / SINGLE).is_file():
        absent = sum(not (directory / name).exists() for name in listed)
        gone = f", {absent} of them not there" if absent else ""
        raise CheckpointError(
            f"{directory}: holds {SINGLE}, and {INDEX}, which lists {len(listed)} other files{gone}; "
            "legal is one of both: transformers reads the whole file, others what the index lists"
        )
    tensors: dict[str, TensorEntry] = {}
    files = tuple(directory / name for name in sorted(listed))
    for file in files:
        # Where two shards hold the same name the index decides; a tensor that the index omits is still taken.
        tensors.update((name, entry) for name, entry in entries_of(file).items() if weight_map.get(name, file.name) == file.name)
    for name, file_name in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{index}: says {name} is in {file_name}, which does not hold it")
    return CheckpointFiles(directory, files, tensors)


def has_weights(directory: Path) -> bool:
    """Whether a directory holds the file or the index of a checkpoint."""
    return any(any(directory.glob(name)) for names in NAMES for name in names)


def _index_or_single(directory: Path) -> tuple[Path | None, Path]:
    """The index of a checkpoint, or None and its one file."""
    for single, index in NAMES:
        for pattern in (index, single):
            paths = sorted(directory.glob(pattern))
            if len(paths) > 1:
                found = ", ".join(path.name for path in paths)
                raise CheckpointError(
                    f"{directory}: holds {found}; legal is one {'index' if pattern == index else 'file without an index'}"
                )
            if paths:
                return (paths[0] if pattern == index else None), paths[0]
    if link := dangling(directory, ".safetensors", ".json"):
        raise CheckpointError(f"{link}: {missing(link)}")
    legal = ", ".join(name for names in NAMES for name in names)
    raise CheckpointError(f"{directory}: holds none of {legal}, the only formats read; {contents(directory)}")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, not copied."""
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view


def layout(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> tuple[bytes, Mapping[str, int]]:
    """Header of a file of tensors, as `safetensors.torch.save` writes it, and the offset of each; `meta` tensors are enough."""
    # Saving empty tensors of the same names and dtypes gives the library's order and dtype codes.
    entries = json.loads(save({name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}, metadata)[8:])
    end, places = 0, {name: entry for name, entry in entries.items() if name in tensors}
    for name, entry in places.items():
        begin, end = end, end + tensors[name].nbytes
        entry |= {"shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: first + entry["data_offsets"][0] for name, entry in places.items()}


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map: Any = read_json(path).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is {_short(weight_map)}; expected an object from tensor names to file names")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise CheckpointError(f"{path}: weight_map says {name} is in {_short(file)}; expected the name of a file in the same directory")
    return weight_map


def entries_of(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file by name.

    Raises:
        CheckpointError: the file is absent, truncated or corrupt.
    """
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
        with safe_open(file, "pt") as handle:
            entries, begin = {}, 8 + header_bytes
            for name in handle.offset_keys():
                view = handle.get_slice(name)
                dtype, shape = view.get_dtype(), tuple(view.get_shape())
                # Data follows the header without gaps in the order of `offset_keys`, so sizes give the offsets.
                end = begin + math.prod(shape) * _bits(dtype) // 8
                entries[name] = TensorEntry(name, file, dtype, shape, begin, end)
                begin = end
            return entries
    except FileNotFoundError:
        index = next(iter(sorted(file.parent.glob("*.safetensors.index.json"))), None)
        raise CheckpointError(f"{file}: {missing(file)}{f', though {index.name} names it' if index else ''}") from None
    except (SafetensorError, OSError) as error:
        size = f"; the file has {file.stat().st_size} bytes" if file.is_file() else ""
        raise CheckpointError(f"{file}: truncated or corrupt safetensors: {error}{size}") from None


def _bits(dtype: str) -> int:
    """Bits of an element: the first number in the code, as in BF16 or F8_E4M3; BOOL has none and takes a byte."""
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 8


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def digest(checkpoint: CheckpointFiles) -> str:
    """Identity of weights and config.json, those of `others` included, equal for a copy: `content:` or `outline:` and 64 hex digits.

    `content:` hashes every byte. Above 2 GiB of tensors that would take longer than loading them, so `outline:` hashes each file's
    size, header, first and last MiB and 64 blocks of 64 KiB at even distances: other weights differ in them, a damaged byte may not.

    Raises:
        CheckpointError: when a file disappeared since the checkpoint was opened.
    """
    small = checkpoint.nbytes <= LARGEST_CONTENT_DIGEST_BYTES
    total = hashlib.sha256()
    places = (checkpoint.directory, *checkpoint.others.values())
    configs = [config for place in places if (config := place / "config.json").exists()]
    for file in (*checkpoint.files, *configs):
        try:
            file_digest = _hash_file(file, _whole if small or file in configs else _outline)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read any more: {error}") from None
        total.update(f"{file.name} {file_digest}\n".encode())
    return f"{'content' if small else 'outline'}:{total.hexdigest()}"


def _hash_file(file: Path, read: Callable[[Path, Callable[[bytes], None]], None]) -> str:
    hasher = hashlib.sha256()
    read(file, hasher.update)
    return hasher.hexdigest()


def _whole(file: Path, update: Callable[[bytes], None]) -> None:
    with file.open("rb") as stream:
        while block := stream.read(_MIB):
            update(block)


def _outline(file: Path, update: Callable[[bytes], None]) -> None:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        header_bytes = int.from_bytes(stream.read(8), "little")
        update(f"{size} ".encode())
        samples = [(size * i // _SAMPLES, _SAMPLE_BYTES) for i in range(_SAMPLES)]
        for begin, count in ((0, 8 + header_bytes), (0, _MIB), *samples, (max(0, size - _MIB), _MIB)):
            stream.seek(begin)
            update(stream.read(count))


def _runs(shape: tuple[int, ...], region: Sequence[slice]) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of every stretch of a region that is contiguous in a tensor of that shape, in order."""
    bounds = [part.indices(size)[:2] for part, size in zip(region, shape, strict=True)]
    inner, dims = 1, len(shape)
    while dims and bounds[dims - 1] == (0, shape[dims - 1]):
        dims -= 1
        inner *= shape[dims]
    if dims == 0:
        yield 0, inner
        return
    # The last dimension that is not whole: what is read of it is contiguous, with all that is inside it.
    begin, end = bounds[dims - 1]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(dims - 1)]
    for outer in itertools.product(*(range(*bounds[dim]) for dim in range(dims - 1))):
        yield sum(i * stride for i, stride in zip(outer, strides, strict=True)) + begin * inner, (end - begin) * inner
