"""Says what lies where a checkpoint was expected, which a refusal otherwise leaves to be guessed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

_OTHER_FORMATS = (
    ("*.gguf", "GGUF, the format of llama.cpp"),
    ("consolidated*.pth", "weights in the layout of their publisher"),
    ("pytorch_model*.bin", "weights that pickle wrote, which `save_pretrained` of transformers writes as safetensors"),
    ("*.onnx", "a graph of ONNX"),
)
_ADAPTER = "adapter_config.json"
_MOST_NAMES = 8


def missing(path: Path) -> str:
    """Why there is no such file: a link may point to what is gone, as an interrupted or moved download leaves it."""
    if not path.is_symlink():
        return "no such file"
    return f"a link to {os.readlink(path)}, which is not there: the download is not complete, or was moved without it"


def dangling(directory: Path, *suffixes: str) -> Path | None:
    """The first file with one of these suffixes that is a link to nothing."""
    links = (path for path in sorted(directory.iterdir()) if path.suffix in suffixes and path.is_symlink())
    return next((path for path in links if not path.exists()), None)


def contents(directory: Path) -> str:
    """What a directory is that is no checkpoint, and what of it may be one."""
    if not directory.is_dir():
        return f"{directory} is no directory"
    return next(_guesses(directory), None) or _listed(directory)


def _guesses(directory: Path) -> Iterator[str]:
    snapshots = sorted(path.parent for path in directory.glob("snapshots/*/config.json"))
    if snapshots:
        yield f"it is the hub's folder of a model, whose checkpoint is {' or '.join(map(str, snapshots[:_MOST_NAMES]))}"
    if (directory / "snapshots").is_dir():
        yield "it is the hub's folder of a model, of which no snapshot has a config.json: the download is not complete"
    models = sorted(path.name for path in (*directory.glob("models--*"), *directory.glob("hub/models--*")))
    if models:
        yield f"it is the hub's cache; legal is MODEL/snapshots/HASH of one of {', '.join(models[:_MOST_NAMES])}"
    if (directory / _ADAPTER).is_file():
        yield f"it holds an adapter (LoRA){_base(directory / _ADAPTER)}, which is merged into its model first: merge_and_unload() of peft"
    for pattern, what in _OTHER_FORMATS:
        if names := sorted(path.name for path in directory.glob(pattern)):
            yield f"it holds {names[0]}, {what}; legal are safetensors"
    inner = sorted(path.parent for path in directory.glob("*/config.json"))
    if inner:
        yield f"{' and '.join(map(str, inner[:_MOST_NAMES]))} {'hold' if len(inner) > 1 else 'holds'} one"


def _base(adapter: Path) -> str:
    try:
        name = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        name = None
    return f" of {name}" if name else ""


def _listed(directory: Path) -> str:
    names = sorted(path.name + "/" * path.is_dir() for path in directory.iterdir())
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"there is {', '.join(names[:_MOST_NAMES])}{more}" if names else "there is nothing"
