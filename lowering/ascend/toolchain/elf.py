"""Turns a shared library into the names it defines, wants and needs (ELF, 64 bit, little endian: all that torch_npu is built for)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from ....graphs.errors import LoweringError

_DYNAMIC, _DYNSYM, _VERSYM = 6, 11, 0x6FFFFFFF
_NEEDED = 1
_GLOBAL = 1


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


@dataclass(frozen=True)
class _Section:
    kind: int
    data: bytes
    link: int


def read_symbols(path: Path) -> Symbols:
    """Reads a library's dynamic symbols.

    Raises:
        LoweringError: the file is not such a library.
    """
    try:
        return _symbols(_sections(path))
    except (struct.error, ValueError, IndexError, StopIteration, UnicodeDecodeError) as error:
        raise LoweringError(f"{path} is not a 64-bit little-endian shared library with dynamic symbols: {error!r}") from None


def _sections(path: Path) -> list[_Section]:
    wanted = (_DYNAMIC, _DYNSYM, _VERSYM)
    with path.open("rb") as stream:
        head = stream.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"it begins with {head[:6]!r}")
        offset, (size, count) = struct.unpack_from("<Q", head, 40)[0], struct.unpack_from("<HH", head, 58)
        stream.seek(offset)
        table = stream.read(size * count)
        rows = [struct.unpack_from("<IIQQQQII", table, at * size) for at in range(count)]
        strings = {row[6] for row in rows if row[1] in wanted}
        sections = []
        for at, row in enumerate(rows):
            stream.seek(row[4])
            sections.append(_Section(row[1], stream.read(row[5]) if row[1] in wanted or at in strings else b"", row[6]))
        return sections


def _symbols(sections: list[_Section]) -> Symbols:
    symbols = next(section for section in sections if section.kind == _DYNSYM)
    dynamic = next(section for section in sections if section.kind == _DYNAMIC)
    versions = next((section.data for section in sections if section.kind == _VERSYM), b"")
    names = sections[symbols.link].data
    defined, undefined = set(), set()
    for at, (name, info, _, section, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", symbols.data)):
        if section:
            defined.add(_text(names, name))
        elif info >> 4 == _GLOBAL and not _versioned(versions, at):
            undefined.add(_text(names, name))
    needed = [_text(sections[dynamic.link].data, value) for tag, value in struct.iter_unpack("<QQ", dynamic.data) if tag == _NEEDED]
    return Symbols(frozenset(defined), frozenset(undefined), tuple(needed))


def _versioned(versions: bytes, at: int) -> bool:
    # 0 and 1 are "local" and "global without a version"; the high bit only says that a version is hidden.
    return bool(versions) and struct.unpack_from("<H", versions, 2 * at)[0] & 0x7FFF > 1


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()
