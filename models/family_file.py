"""A family of the user's own: one Python file outside this package, which ends with `FAMILY = Family(...)`.

Its text decides graphs as the sources of this package do, so it goes wherever a model goes: into the digests of builds, the processes of a
build, and the artifact. Nothing reads the file again after `FamilyFile.read`.
"""

from __future__ import annotations

import ast
import hashlib
import pickle
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from ..graphs.errors import ArtifactStale, FamilyError, NpucompileError
from .family import DraftHead, Family, ModelConfig

PREFIX = "npucompile_family_"
"""Of the names under which the modules are imported; the rest is a digest of the text."""

IMPORTS = ("npucompile", "torch", "numpy")
"""What a file may import besides the standard library: the digests of a build cover their versions, and those of nothing else."""


@dataclass(frozen=True)
class FamilyFile:
    """The text of a family's file.

    Attributes:
        path: absolute path that it was read from.
        text: its contents.
    """

    path: str
    text: str

    @staticmethod
    def read(path: str | Path) -> FamilyFile:
        """Reads a file.

        Raises:
            FamilyError: there is none, or it is not UTF-8 text.
        """
        file = Path(path).expanduser().resolve()
        if not file.is_file():
            what = "is a directory" if file.is_dir() else "does not exist"
            raise FamilyError(f"--family {path}: {file} {what}; legal is a Python file that ends with FAMILY = Family(...)")
        try:
            return FamilyFile(str(file), file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise FamilyError(f"--family {path}: cannot be read as UTF-8 text: {error}") from None

    @staticmethod
    def recorded(model: Mapping[str, Any]) -> FamilyFile | None:
        """The file of an artifact's family, from `Manifest.model`; None where this package has the family."""
        return FamilyFile(str(model["family_file"]["path"]), str(model["family_file"]["text"])) if "family_file" in model else None

    def as_fields(self) -> dict[str, str]:
        """What a manifest records: the file's name, the digest, where it was, and the text, so that an artifact needs no other file."""
        return {"name": self.name, "sha256": self.digest, "path": self.path, "text": self.text}

    @property
    def name(self) -> str:
        """The file's name without its directory."""
        return Path(self.path).name

    @cached_property
    def digest(self) -> str:
        """sha256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def module_name(self) -> str:
        """Name of its module; pickled functions are found by it in processes that called `load`."""
        return PREFIX + self.digest[:32]

    def load(self) -> Family[Any]:
        """Its family; the text is run once a process.

        Raises:
            FamilyError: it cannot be run, or what it calls FAMILY is not a usable family; names the line or the field.
        """
        module = sys.modules.get(self.module_name) or self._run()
        family = getattr(module, "FAMILY", None)
        if not isinstance(family, Family):
            what = f"FAMILY is a {type(family).__name__}" if hasattr(module, "FAMILY") else "defines no FAMILY"
            raise FamilyError(f"{self.path}: {what}; expected FAMILY = Family(...), of npucompile.models.family")
        _check(family, self.path)
        return family

    def check_unchanged(self, artifact: Path) -> None:
        """Refuses an artifact whose family's file was changed since; where there is no file, the recorded text is all there is.

        Raises:
            ArtifactStale: naming both digests.
        """
        if Path(self.path).is_file() and (now := FamilyFile.read(self.path)).digest != self.digest:
            raise ArtifactStale(
                f"{artifact} was built with the family file {self.path} of sha256 {self.digest[:16]}, which now is {now.digest[:16]}; "
                "build it again, or restore the file"
            )

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Turns an exception of the file's functions into an error that names the file's line.

        Raises:
            FamilyError: such an exception was raised.
        """
        try:
            yield
        except NpucompileError:
            raise
        except Exception as error:
            if (where := self._where(error)) is None:
                raise
            raise FamilyError(where) from error

    def _run(self) -> ModuleType:
        module = ModuleType(self.module_name)
        module.__file__ = self.path
        # Before it runs: a dataclass looks up its own module.
        sys.modules[self.module_name] = module
        try:
            with self.blamed():
                tree = ast.parse(self.text, self.path)
                _check_imports(tree, self.path)
                exec(compile(tree, self.path, "exec", dont_inherit=True), module.__dict__)
        except BaseException:
            del sys.modules[self.module_name]
            raise
        return module

    def _where(self, error: Exception) -> str | None:
        """Line and text of the file that raised an exception, and what it says; None where it went through no line of the file."""
        if isinstance(error, SyntaxError) and error.filename == self.path:
            number, message = error.lineno or 1, error.msg
        else:
            numbers = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == self.path]
            if not numbers:
                return None
            number, message = numbers[-1], str(error)
        line = [*self.text.splitlines(), ""][number - 1].strip()
        return f"{self.path}, line {number}: {line}\n  {type(error).__name__}: {message}"


def _check_imports(module: ast.Module, where: str) -> None:
    """Refuses imports of what no digest of a build covers."""
    for node in ast.walk(module):
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            named = ["." * node.level + (node.module or "")]
        for name in named:
            top = name.partition(".")[0]
            if top not in IMPORTS and top not in sys.stdlib_module_names:
                raise FamilyError(
                    f"{where}, line {getattr(node, 'lineno', 0)}: imports {name}; legal are the standard library, {', '.join(IMPORTS)}: "
                    "a build would not notice a change of anything else, so a family is one file"
                )


def _check(family: Family[Any], where: str) -> None:
    """Refuses a record with a field of the wrong kind, or a function that another process could not find."""
    name, types = family.name, family.model_types
    if not isinstance(name, str) or not name:
        raise FamilyError(f"{where}: FAMILY.name is {name!r}; expected a name")
    if not isinstance(types, tuple) or not types or not all(isinstance(each, str) for each in types):
        raise FamilyError(f"{where}: FAMILY.model_types is {types!r}; expected a tuple of values of model_type in config.json")
    if not isinstance(family.widths, Mapping):
        raise FamilyError(f"{where}: FAMILY.widths is {family.widths!r}; expected a mapping such as npucompile.models.shrink.WIDTHS")
    if family.draft_head is not None and not isinstance(family.draft_head, DraftHead):
        raise FamilyError(f"{where}: FAMILY.draft_head is {family.draft_head!r}; expected a DraftHead, or None")
    functions = {f"FAMILY.{field}": getattr(family, field) for field in _FUNCTIONS}
    if family.draft_head:
        functions |= {f"FAMILY.draft_head.{field}": getattr(family.draft_head, field) for field in ("extend_cache", "draft", "logits")}
    for field, function in functions.items():
        if not callable(function):
            raise FamilyError(f"{where}: {field} is {function!r}; expected a function")
        try:
            pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError):
            raise FamilyError(
                f"{where}: {field} is {getattr(function, '__qualname__', function)!r}; expected a function that is defined at the top of "
                "the file or imported, because the processes of a build look it up there"
            ) from None


_FUNCTIONS = ("read_config", "abstract_params", "abstract_state", "forward", "head", "shrink")


def check_config(config: object, where: str) -> None:
    """Refuses a configuration that lacks what builds read of any family's.

    Raises:
        FamilyError: naming what it lacks.
    """
    kind = type(config).__name__
    if not is_dataclass(config) or isinstance(config, type) or not config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise FamilyError(f"{where}: read_config returned a {kind}; expected a frozen dataclass")
    if "variant" not in {field.name for field in fields(config)}:
        raise FamilyError(f"{where}: {kind} has no field variant; expected `variant: Variant = PLAIN`, of npucompile.models.variant")
    wanted = sorted(name for name, value in vars(ModelConfig).items() if isinstance(value, property))
    if missing := [name for name in wanted if not hasattr(config, name)]:
        raise FamilyError(f"{where}: {kind} lacks {', '.join(missing)}; a configuration has {', '.join(wanted)}")
