"""Lines of each room, now and where the branch began. `make size` runs this file."""

from __future__ import annotations

import subprocess
import tarfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("graphs", "models", "lowering", "runtime", "server", "tools")
# Folders of which each folder inside is a room, as are the files beside them.
DIVIDED = ("lowering", "runtime", "server", "tools")
# Rooms beside the core, which are counted apart.
BESIDE = ("tools/advisor", "tools/lab")
DOCS = "docs (words)"
# Code, and data of ours; a checkpoint is neither.
COUNTED, CHECKPOINTS = (".py", ".cpp", ".h", ".json"), "models/bundled/"


def room_of(path: str) -> str | None:
    """The room of a file, by its path relative to the root; None for what is not counted."""
    top, *inner = path.split("/")
    if path.endswith(".md") and (top == "docs" or path == "README.md"):
        return DOCS
    if not path.endswith(COUNTED) or top not in (*FOLDERS, "tests") or path.startswith(CHECKPOINTS):
        return None
    return f"{top}/{inner[0]}" if top in DIVIDED and len(inner) > 1 else top


def add(sizes: Counter[str], path: str, text: str) -> None:
    if room := room_of(path):
        sizes[room] += len(text.split()) if room == DOCS else len(text.splitlines())


def present(root: Path = ROOT) -> Counter[str]:
    """Lines of each room in the working tree; words for documents."""
    sizes: Counter[str] = Counter()
    for folder in (*FOLDERS, "tests", "docs"):
        for path in (root / folder).rglob("*.*"):
            if room_of(name := path.relative_to(root).as_posix()):
                add(sizes, name, path.read_text(encoding="utf-8"))
    if (readme := root / "README.md").is_file():
        add(sizes, "README.md", readme.read_text(encoding="utf-8"))
    return sizes


def at(commit: str, root: Path = ROOT) -> Counter[str]:
    """Lines of each room in a commit."""
    sizes: Counter[str] = Counter()
    with (
        subprocess.Popen(["git", "archive", commit], cwd=root, stdout=subprocess.PIPE) as archive,
        tarfile.open(fileobj=archive.stdout, mode="r|") as files,
    ):
        for file in files:
            if file.isfile() and room_of(file.name) and (content := files.extractfile(file)):
                add(sizes, file.name, content.read().decode())
    return sizes


def git(*arguments: str, root: Path = ROOT) -> str:
    """What git prints, or nothing where it fails."""
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout.strip()


def base(root: Path = ROOT) -> tuple[str, str]:
    """A commit to compare with and what it is: where the branch left main, or on main the parent; empty where there is neither."""
    head = git("rev-parse", "HEAD", root=root)
    for main in ("origin/main", "main"):
        merge_base = git("merge-base", "HEAD", main, root=root)
        if merge_base and merge_base != head:
            return merge_base, f"the merge base with {main}"
    return git("rev-parse", "--verify", "--quiet", "HEAD~1", root=root), "the parent commit"


def report(sizes: Counter[str], before: Counter[str] | None) -> str:
    """A table of rooms, and of the six folders together."""
    rooms = sorted({*sizes, *(before or ())}, key=lambda room: (room == DOCS, room == "tests", room))
    six = [room for room in rooms if room not in (*BESIDE, "tests", DOCS)]

    def row(name: str, members: list[str]) -> str:
        lines = sum(sizes[room] for room in members)
        change = "" if before is None else f"{lines - sum(before[room] for room in members):+9}"
        return f"{lines:9}{change}  {name}"

    return "\n".join([*(row(room, [room]) for room in rooms), row(f"the six folders without {' and '.join(BESIDE)}", six)])


def main() -> None:
    commit, what = base()
    if commit:
        print(f"Lines of each room, compared with {commit[:10]}, {what}:")
    else:
        print("Lines of each room; this clone has no earlier commit to compare with:")
    print(report(present(), at(commit) if commit else None))


if __name__ == "__main__":
    main()
