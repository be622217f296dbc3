"""The dynamic symbols of a shared library: what it defines, and what it wants from others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....graphs.errors import LoweringError


@dataclass(frozen=True)
class Symbols:
    """Dynamic symbols of one library.

    Attributes:
        defined: names it offers.
        undefined: names it must find elsewhere; not those that may be absent (weak), nor those with a version, which only
            the C and C++ runtimes have.
        needed: SONAMEs of the libraries it asks the loader for.
    """

    defined: frozenset[str]
    undefined: frozenset[str]
    needed: tuple[str, ...]


def read_symbols(path: Path) -> Symbols:
    """Reads a library's dynamic symbols.

    Raises:
        LoweringError: the file is not a shared library.
    """
    # Not at the top: this module is imported where the npu extra is not installed, too.
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as stream:
            return _symbols(ELFFile(stream))
    except (ELFError, KeyError, ValueError) as error:
        raise LoweringError(f"{path} is not a shared library with dynamic symbols: {error!r}") from None


def _symbols(elf: Any) -> Symbols:
    sections = {name: elf.get_section_by_name(name) for name in (".dynsym", ".dynamic", ".gnu.version")}
    if absent := [name for name in (".dynsym", ".dynamic") if sections[name] is None]:
        raise ValueError(f"it has no {' and no '.join(absent)}")
    versions, defined, undefined = sections[".gnu.version"], set(), set()
    for index, symbol in enumerate(sections[".dynsym"].iter_symbols()):
        if symbol["st_shndx"] != "SHN_UNDEF":
            defined.add(symbol.name)
        # An index with a name of its own, VER_NDX_GLOBAL, stands for a symbol without a version.
        elif symbol["st_info"]["bind"] == "STB_GLOBAL" and (versions is None or isinstance(versions.get_symbol(index)["ndx"], str)):
            undefined.add(symbol.name)
    needed = tuple(tag.needed for tag in sections[".dynamic"].iter_tags("DT_NEEDED"))
    return Symbols(frozenset(defined), frozenset(undefined), needed)
