"""Finds the checkpoint that a hub's name stands for: in the caches of Hugging Face and ModelScope, or else fetched into one of them."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..graphs.errors import CheckpointError, UnknownModel
from ..graphs.paths import directory_named
from ..models.directories import HUB_NAME, MODELSCOPE_DOT
from .progress import Progress

FACTS = ("*.json", "*.jinja", "tiktoken.model", "tokenization_kimi.py")
"""Files beside the weights that are read; the index of the weights is among them."""
INDEX = "*.safetensors.index.json"
WEIGHTS = ("model.safetensors", "quant_model_weight*.safetensors")
"""Weights without an index."""
BESIDE = "optional/*.safetensors"
"""What ModelSlim writes beside weights that it rotated."""

MIB = 2**20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class HubName:
    """What is looked for.

    Attributes:
        name: `ORG/NAME`.
        revision: None for the default one.
        weights: whether they are read, too.
        environment: variables of the process, which say where caches are and how hubs are reached.
    """

    name: str
    revision: str | None
    weights: bool
    environment: Mapping[str, str]

    @property
    def hf_cache(self) -> Path:
        """The cache of Hugging Face."""
        own = self.environment.get("HF_HUB_CACHE") or self.environment.get("HUGGINGFACE_HUB_CACHE")
        shared = self.environment.get("XDG_CACHE_HOME") or "~/.cache"
        home = self.environment.get("HF_HOME") or f"{shared}/huggingface"
        return Path(own or f"{home}/hub").expanduser()

    @property
    def modelscope_cache(self) -> Path:
        """The cache of ModelScope."""
        return Path(self.environment.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()

    def places(self) -> Iterator[Path]:
        """Directories where it may lie already."""
        owner, model = self.name.split("/")
        for folder in (self.hf_cache / f"models--{owner}--{model}", self.modelscope_cache / "models" / f"{owner}--{model}"):
            ref, snapshots = folder / "refs" / (self.revision or "main"), folder / "snapshots"
            if ref.is_file():
                yield snapshots / ref.read_text(encoding="utf-8").strip()
            elif self.revision is not None:
                yield snapshots / self.revision
            else:
                yield from (snapshots / "master", snapshots / "main")
                # Without a branch, as copies of a cache are, one snapshot alone can be meant.
                yield from kept if len(kept := list(snapshots.glob("*"))) == 1 else ()
        # Where ModelScope put models before 1.38.
        for root in ("models", ".", "hub/models") if self.revision is None else ():
            yield self.modelscope_cache / root / owner / model.replace(".", MODELSCOPE_DOT)

    def shards(self, directory: Path) -> list[str]:
        """Names of the weights that a directory's index lists; empty where there is none."""
        listed: set[str] = set()
        for index in directory.glob(INDEX):
            try:
                listed |= {str(shard) for shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise CheckpointError(f"{index}: lists no weights: {error!r}") from None
        return sorted(listed)

    def lacking(self, directory: Path) -> list[str]:
        """What a directory lacks of the files without which there is no checkpoint."""
        absent = [] if (directory / "config.json").is_file() else ["config.json"]
        if absent or not self.weights:
            return absent
        if shards := self.shards(directory):
            return [shard for shard in shards if not (directory / shard).is_file()]
        whole = any(file.is_file() for pattern in WEIGHTS for file in directory.glob(pattern))
        return [] if whole else [WEIGHTS[0]]


def checkpoint_of(name: str, environment: Mapping[str, str], progress: Progress, *, weights: bool = True) -> str:
    """The path of the checkpoint that a hub's name stands for; other texts as they are, and so are names of directories.

    A copy in a cache is taken as it is; nobody asks the hub whether there is a newer one.

    Args:
        weights: whether they are read, too.

    Raises:
        UnknownModel: it is in no cache, and cannot be fetched.
        CheckpointError: what was fetched is no checkpoint, or is not what the hub says it is.
    """
    found = HUB_NAME.fullmatch(name)
    if found is None or directory_named(name):
        return name
    wanted = HubName(found["name"], found["revision"], weights, environment)
    places = [place for place in wanted.places() if place.is_dir()]
    complete = next((place for place in places if not wanted.lacking(place)), None)
    return str(complete or _fetched(wanted, places, progress))


def _fetched(wanted: HubName, places: list[Path], progress: Progress) -> Path:
    """The checkpoint, fetched from the first hub that can be asked and has it."""
    reasons = []
    for fetch in (_from_hugging_face, _from_modelscope):
        try:
            directory = fetch(wanted, progress)
        except _Unreachable as error:
            reasons.append(str(error))
            continue
        if lacking := wanted.lacking(directory):
            raise CheckpointError(f"{wanted.name} has no {_few(lacking)} at the hub; legal is a model with config.json and safetensors")
        return directory
    there = [f"{place} lacks {_few(wanted.lacking(place))}" for place in places]
    looked = there or [f"it is neither in {wanted.hf_cache} nor in {wanted.modelscope_cache}"]
    raise UnknownModel(
        f"{wanted.name} is neither a directory nor here as a model of a hub: {'; '.join((*looked, *reasons))}; legal is a path, or a name "
        "that can be fetched"
    )


class _Unreachable(Exception):
    """A hub cannot be asked, or does not have the model."""


def _from_hugging_face(wanted: HubName, progress: Progress) -> Path:
    try:
        library, errors = map(importlib.import_module, ("huggingface_hub", "huggingface_hub.errors"))
    except ImportError:
        raise _Unreachable("huggingface_hub is not installed") from None
    endpoint = wanted.environment.get("HF_ENDPOINT") or "https://huggingface.co"

    def fetch(patterns: list[str], revision: str | None, ignored: list[str] | None = None) -> Path:
        return Path(
            library.snapshot_download(
                wanted.name, revision=revision, cache_dir=wanted.hf_cache, endpoint=endpoint, allow_patterns=patterns,
                ignore_patterns=ignored, token=wanted.environment.get("HF_TOKEN") or None,
            )
        )  # fmt: skip

    _say(wanted, endpoint, wanted.hf_cache, progress)
    try:
        # Without its shards an index would be a checkpoint that is not complete.
        directory = fetch(list(FACTS), wanted.revision, ["*/*", *(() if wanted.weights else (INDEX,))])
    except errors.GatedRepoError:
        raise UnknownModel(
            f"{wanted.name} is gated: {endpoint}/{wanted.name} says who may have it; legal is HF_TOKEN of somebody who may"
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        what = f"revision {wanted.revision} of {wanted.name}" if wanted.revision else wanted.name
        raise _Unreachable(f"{endpoint} has no {what}, or shows it to others alone (HF_TOKEN)") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _Unreachable(f"{endpoint} cannot be reached: {_first_line(error.__cause__ or error)}") from None
    except Exception as error:  # Its errors are of requests and of the file system, without a common class.
        raise _Unreachable(f"{endpoint}: {_first_line(error)}") from error
    if wanted.weights:
        shards = wanted.shards(directory) or WEIGHTS
        try:
            fetch([*shards, BESIDE], directory.name)
        except Exception as error:  # As above.
            raise CheckpointError(
                f"{wanted.name} came from {endpoint} in part, and the next try goes on: {directory} lacks "
                f"{_few(wanted.lacking(directory))}: {_first_line(error)}"
            ) from error
        _check_digests(sorted(directory.rglob("*.safetensors")), progress)
    return directory


def _from_modelscope(wanted: HubName, progress: Progress) -> Path:
    try:
        library = importlib.import_module("modelscope")
    except ImportError:
        raise _Unreachable("modelscope is not installed") from None

    def fetch(patterns: list[str]) -> Path:
        # It reads by itself where its cache is.
        return Path(library.snapshot_download(wanted.name, revision=wanted.revision, allow_patterns=patterns))

    _say(wanted, "ModelScope", wanted.modelscope_cache, progress)
    try:
        directory = fetch(list(FACTS))
        return fetch([*FACTS, *(wanted.shards(directory) or WEIGHTS), BESIDE]) if wanted.weights else directory
    except CheckpointError:
        raise
    except Exception as error:  # As those of the other library.
        raise _Unreachable(f"ModelScope: {_first_line(error)}") from None


def _say(wanted: HubName, hub: str, cache: Path, progress: Progress) -> None:
    """Says what is fetched and whither; the hub's library draws how far it is."""
    progress.say(f"fetching {'' if wanted.weights else 'the configuration of '}{wanted.name} from {hub} into {cache}")


def _check_digests(files: list[Path], progress: Progress) -> None:
    """Compares what was fetched with the digests by which the cache names it; files that are named otherwise have none."""
    named = [(file, file.resolve()) for file in files if _SHA256.fullmatch(file.resolve().name)]
    with progress.byte_bar("checking digests, MB", sum(blob.stat().st_size for _, blob in named)) as bar:
        for file, blob in named:
            if (digest := _sha256(blob, bar.add)) != blob.name:
                file.unlink()
                blob.unlink()
                raise CheckpointError(
                    f"{file}: has sha256 {digest[:16]} and the hub says {blob.name[:16]}; it is removed, and the next try fetches it again"
                )


def _sha256(file: Path, add: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(MIB):
            digest.update(block)
            add(len(block))
    return digest.hexdigest()


def _few(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
