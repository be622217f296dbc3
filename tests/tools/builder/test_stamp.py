"""tools/builder/stamp.py: a stamp changes with everything that decides a build, and needs no torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import npucompile
from npucompile.tools.builder import stamp
from npucompile.tools.builder.stamp import FOLDERS, fingerprint, matches, stamp_file, write

ROOT = Path(__file__).parents[3]
KERNELS = ("lowering/cpp/kernel.cpp", "lowering/cpp/kernel.h")
OPTIONS = {"model": "m", "buckets": (2, 4), "mesh": None, "out": Path("/a")}


@pytest.fixture
def package(tmp_path):
    """A package of one source a folder, with a bundled model."""
    root = tmp_path / "package"
    for folder in (*FOLDERS, "models/bundled/small", "graphs/ops", "lowering/cpp"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "source.py").write_text("x = 1\n")
    (root / "__init__.py").write_text("")
    (root / "tools" / "table.json").write_text("{}")
    for name in ("kernel.cpp", "kernel.h"):
        (root / "lowering/cpp" / name).write_text("")
    (root / "models/bundled/small/config.json").write_text("{}")
    return root


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.safetensors").write_bytes(b"1234")
    return tmp_path / "model"


@pytest.fixture
def artifact(tmp_path):
    out = tmp_path / "artifact"
    (out / "graphs").mkdir(parents=True)
    (out / "manifest.msgpack").write_bytes(b"manifest")
    for name in ("a", "b"):
        (out / "graphs" / f"{name}.ge").write_bytes(b"graph")
    write(out, "f", ["graphs/b.ge", "graphs/a.ge"])
    return out


def later(file: Path) -> None:
    """The same file, changed a second later."""
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def test_the_same_build_has_the_same_fingerprint(package, checkpoint):
    first = fingerprint(OPTIONS, package, [checkpoint])
    assert fingerprint(dict(reversed(OPTIONS.items())), package, [checkpoint]) == first
    assert fingerprint({k: v for k, v in OPTIONS.items() if v is not None}, package, [checkpoint]) == first
    assert fingerprint(OPTIONS, package, iter([checkpoint])) == first
    # What Python or a test run leaves beside the sources decides nothing, nor does the time at which sources were copied.
    (package / "graphs" / "__pycache__").mkdir()
    (package / "graphs" / "__pycache__" / "source.pyc").write_bytes(b"x")
    later(package / "graphs" / "source.py")
    assert fingerprint(OPTIONS, package, [checkpoint]) == first


def test_everything_that_the_package_is_made_of_counts():
    """Or an artifact of other sources would pass for a new one: kernels in C++ once did."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    left_out = [file for file in files if not file.is_relative_to(ROOT / stamp.BUNDLED) and file.suffix not in stamp.SOURCES]
    assert any(file.suffix == ".cpp" for file in files)
    assert not left_out


@pytest.mark.parametrize(
    "changed",
    [{"model": "n"}, {"buckets": (2, 4, 8)}, {"mesh": "tp=2"}, {"out": Path("/b")}, {"more": 1}],
    ids=lambda changed: next(iter(changed)),
)
def test_every_option_counts(package, checkpoint, changed):
    assert fingerprint(OPTIONS | changed, package, [checkpoint]) != fingerprint(OPTIONS, package, [checkpoint])


@pytest.mark.parametrize(
    "path", ["__init__.py", *(f"{folder}/source.py" for folder in FOLDERS), "graphs/ops/source.py", "tools/table.json", *KERNELS]
)
def test_every_source_counts(package, checkpoint, path):
    before = fingerprint(OPTIONS, package, [checkpoint])
    status = (package / path).stat()
    (package / path).write_text("x = 2\n")
    # Even one of the same size and time.
    os.utime(package / path, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = fingerprint(OPTIONS, package, [checkpoint])
    assert changed != before
    (package / path).rename(package / "graphs" / "renamed.py")
    if path != "__init__.py":
        assert fingerprint(OPTIONS, package, [checkpoint]) not in (before, changed)


def test_a_familys_file_counts_by_content(package, checkpoint, tmp_path):
    file = tmp_path / "own.py"
    absent = fingerprint(OPTIONS, package, [checkpoint], [file])
    file.write_text("x = 1\n")
    before = fingerprint(OPTIONS, package, [checkpoint], [file])
    later(file)
    assert fingerprint(OPTIONS, package, [checkpoint], [file]) == before
    status = file.stat()
    file.write_text("x = 2\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    digests = {absent, before, fingerprint(OPTIONS, package, [checkpoint], [file]), fingerprint(OPTIONS, package, [checkpoint])}
    assert len(digests) == 4


def test_models_count_by_size_and_time(package, checkpoint):
    digests = [fingerprint(OPTIONS, package, [checkpoint])]
    for change in (
        lambda: later(checkpoint / "a.safetensors"),
        lambda: (checkpoint / "b.safetensors").write_bytes(b""),
        lambda: (checkpoint / "b.safetensors").unlink(),
        lambda: (checkpoint / "a.safetensors").unlink(),
        lambda: later(package / "models/bundled/small/config.json"),
    ):
        change()
        digests.append(fingerprint(OPTIONS, package, [checkpoint]))
    assert len(set(digests)) == len(digests) - 1
    assert digests[1] == digests[3]
    assert fingerprint(OPTIONS, package, [checkpoint / "gone"]) != fingerprint(OPTIONS, package, [])


@pytest.mark.parametrize("name", ["torch", "torch_npu", "protobuf", "safetensors"])
def test_versions_count(package, monkeypatch, name):
    before, version = fingerprint(OPTIONS, package, []), importlib.metadata.version

    def newer(package_name):
        if package_name == name:
            return "99"
        return version(package_name)

    monkeypatch.setattr(importlib.metadata, "version", newer)
    assert fingerprint(OPTIONS, package, []) != before


def test_the_machine_counts(package, monkeypatch):
    before = fingerprint(OPTIONS, package, [])
    assert stamp._cpu_flags()
    monkeypatch.setattr(stamp, "_cpu_flags", lambda: "avx9")
    other = fingerprint(OPTIONS, package, [])
    monkeypatch.setattr(stamp, "ISA", "avx2")
    hidden = fingerprint(OPTIONS, package, [])
    monkeypatch.setattr(stamp.platform, "machine", lambda: "abacus")
    assert len({before, other, hidden, fingerprint(OPTIONS, package, [])}) == 4


def test_a_stamp_matches_what_it_was_made_of(artifact):
    assert matches(artifact, "f")
    assert not matches(artifact, "g")
    assert set(json.loads(stamp_file(artifact).read_text())["files"]) == {"graphs/a.ge", "graphs/b.ge"}
    assert sorted(path.name for path in artifact.iterdir()) == ["graphs", "manifest.msgpack"]


def enlarged(file: Path) -> None:
    """At the same time."""
    status = file.stat()
    file.write_bytes(b"graph and more")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def restamped(out: Path, **changes: object) -> None:
    stamp_file(out).write_text(json.dumps(json.loads(stamp_file(out).read_text()) | changes))


@pytest.mark.parametrize(
    "change",
    [
        lambda out: (out / "manifest.msgpack").write_bytes(b"manifesd"),
        lambda out: (out / "manifest.msgpack").unlink(),
        lambda out: later(out / "graphs/a.ge"),
        lambda out: (out / "graphs/a.ge").unlink(),
        lambda out: enlarged(out / "graphs/a.ge"),
        lambda out: stamp_file(out).unlink(),
        lambda out: restamped(out, format=2),
        lambda out: restamped(out, files=["graphs/a.ge"]),
    ],
    ids=["manifest", "no_manifest", "file", "no_file", "size", "no_stamp", "format", "files"],
)
def test_an_artifact_that_changed_does_not(artifact, change):
    change(artifact)
    assert not matches(artifact, "f")


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", "{}", '{"format": 1}', '{"format": 1, "fingerprint": "f", "manifest": 1}', "\xff"]
)
def test_a_stamp_that_cannot_be_read_matches_nothing(artifact, damage):
    stamp_file(artifact).write_bytes(damage.encode("latin-1"))
    assert not matches(artifact, "f")


def test_a_build_that_left_files_out_leaves_no_stamp(artifact):
    stamp_file(artifact).unlink()
    with pytest.raises(OSError, match="gone"):
        write(artifact, "f", ["gone"])
    assert not stamp_file(artifact).exists()


def test_it_loads_no_torch():
    script = (
        "from pathlib import Path; import sys\n"
        "from npucompile.tools.builder import stamp\n"
        f"stamp.fingerprint({{'model': 'm'}}, Path({str(ROOT)!r}), [])\n"
        "stamp.matches(Path('/nowhere'), 'f')\n"
        "house = sorted(name for name in sys.modules if name.startswith('npucompile'))\n"
        "heavy = [name for name in ('torch', 'numpy', 'click', 'msgpack') if name in sys.modules]\n"
        "print(house, heavy)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['npucompile', 'npucompile.tools', 'npucompile.tools.builder', 'npucompile.tools.builder.stamp'] []"


# --- sources that decide graphs ---


@pytest.fixture
def sources(tmp_path):
    """A package of few files."""
    for part in stamp.GRAPH_SOURCES:
        file = tmp_path / (part if part.endswith(".py") else f"{part}/inner/one.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n")
    (tmp_path / "tools" / "cli.py").write_text("y = 1\n")
    (tmp_path / "graphs" / "notes.txt").write_text("z")
    return tmp_path


def digest(root):
    stamp.source_digest.cache_clear()
    return stamp.source_digest(root)


@pytest.mark.parametrize("part", stamp.GRAPH_SOURCES)
def test_a_change_of_any_part_changes_it(sources, part):
    before = digest(sources)
    file = sources / part if part.endswith(".py") else sources / part / "inner" / "one.py"
    file.write_text("x = 2\n")
    after = digest(sources)
    assert after != before
    file.write_text("x = 1\n")
    assert digest(sources) == before


def test_names_count_as_contents_do(sources):
    before = digest(sources)
    (sources / "graphs" / "inner" / "one.py").rename(sources / "graphs" / "inner" / "two.py")
    moved = digest(sources)
    (sources / "graphs" / "inner" / "two.py").rename(sources / "lowering" / "inner" / "two.py")
    again = digest(sources)
    (sources / "models" / "new.py").write_text("")
    assert len({before, moved, again, digest(sources)}) == 4


def test_what_decides_no_graph_does_not_count(sources):
    before = digest(sources)
    (sources / "tools" / "cli.py").write_text("y = 2\n")
    (sources / "graphs" / "notes.txt").write_text("other")
    (sources / "graphs" / "__pycache__").mkdir()
    (sources / "graphs" / "__pycache__" / "one.pyc").write_bytes(b"other")
    assert digest(sources) == before


def test_its_own_package_is_read_once():
    root = Path(npucompile.__file__).parent
    assert root == stamp.ROOT
    assert all((root / part).exists() for part in stamp.GRAPH_SOURCES)
    stamp.source_digest.cache_clear()
    assert stamp.source_digest() == stamp.source_digest()
    assert stamp.source_digest.cache_info().misses == 1
    assert len(stamp.source_digest()) == 64
