"""Says what a directory is: of which model of a hub it is a copy, or what lies where a checkpoint was expected."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_OTHER_FORMATS = (
    ("*.gguf", "GGUF, the format of llama.cpp"),
    ("consolidated*.pth", "weights in the layout of their publisher"),
    ("pytorch_model*.bin", "weights that pickle wrote, which `save_pretrained` of transformers writes as safetensors"),
    ("*.onnx", "a graph of ONNX"),
)
_ADAPTER = "adapter_config.json"
_MOST_NAMES = 8

HUB_NAME = re.compile(r"(?P<name>(?P<owner>\w[\w.-]*)/(?P<model>\w[\w.-]*))(@(?P<revision>[\w./-]+))?")
"""`ORG/NAME`, or `ORG/NAME@REVISION`: a branch, a tag or a commit."""
MODELSCOPE_DOT, MODELSCOPE_VERSION = "___", ".mv"
"""What stood for a dot in folders of ModelScope's cache before 1.38, and the file there that says which revision it is."""


@dataclass(frozen=True)
class Origin:
    """The model of a hub that a directory is a copy of.

    Attributes:
        name: `ORG/NAME`.
        revision: the commit, or at ModelScope the branch; "" where nothing says it.
    """

    name: str
    revision: str

    @staticmethod
    def of(directory: Path) -> Origin | None:
        """The origin of a directory in a hub's cache; None for any other."""
        path = directory.resolve()
        folder = path.parents[1].name if len(path.parents) > 1 else ""
        if path.parent.name == "snapshots" and (found := re.fullmatch(r"(?:models--)?(.+?)--(.+)", folder)):
            return Origin(f"{found[1]}/{found[2]}", path.name)
        try:
            said = (path / MODELSCOPE_VERSION).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        revision = re.match(r"Revision:([^,\s]*)", said)
        return Origin(f"{path.parent.name}/{path.name.replace(MODELSCOPE_DOT, '.')}", revision[1] if revision else "")


def name_of(directory: Path) -> str:
    """What the model in a directory is called: its own name at a hub, or the directory's."""
    origin = Origin.of(directory)
    return origin.name.rpartition("/")[2] if origin else directory.resolve().name


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
