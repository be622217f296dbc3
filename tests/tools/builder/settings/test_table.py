"""tools/builder/settings/table.py: a setting is a record, and stands nowhere else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import npucompile
from npucompile.models.quant import recipes
from npucompile.tools.builder import precision, targets
from npucompile.tools.builder.plan import Options
from npucompile.tools.builder.settings import model, place
from npucompile.tools.builder.settings.table import EXPLAINED, SETTINGS
from npucompile.tools.commands.build import command
from npucompile.tools.serve.options import OPTIONS

TOOLS = Path(npucompile.__file__).parent / "tools"

ELSEWHERE = 32
"""Strings in other files that are the name of a setting alone: arguments of builds that launch lines, searches and benchmarks propose."""


def names_alone(path: Path) -> list[str]:
    """Strings of a file that are the option of a setting of several words, with or without dashes, and nothing else."""
    # An option of serve with the same name has a record of its own.
    options = {setting.option for setting in SETTINGS if "-" in setting.option} - {option.option for option in OPTIONS}
    strings = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return [text for text in strings if isinstance(text, str) and text.removeprefix("--") in options]


def test_the_name_of_a_setting_stands_in_its_record():
    """The count may only fall."""
    others = [path for path in sorted(TOOLS.rglob("*.py")) if path.parent != TOOLS / "builder" / "settings"]
    found = {path.relative_to(TOOLS).as_posix(): names for path in others if (names := names_alone(path))}
    assert sum(map(len, found.values())) <= ELSEWHERE, found


def test_options_of_a_build_are_those_of_the_records():
    fields = set(Options.__dataclass_fields__) - {"model", "decided_by"}
    assert {setting.name for setting in SETTINGS} == fields
    assert len({setting.option for setting in SETTINGS}) == len(SETTINGS)
    assert fields <= {parameter.name for parameter in command.params}


def test_what_is_legal_is_what_other_folders_name():
    assert place.TARGETS == targets.TARGETS
    assert tuple(recipes.SCHEMES) == model.SCHEMES
    assert ("auto", *precision.DTYPES) == model.DTYPE.legal


def test_what_is_explained_is_said_in_sentences():
    for setting in EXPLAINED.values():
        assert setting.planned.endswith(".")
        assert not re.search(r"[.:]$", setting.change)


def test_the_table_of_names_is_that_of_the_records():
    page = Path(__file__).parents[4] / "docs" / "coming-from-sglang-or-vllm.md"
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (.*) \|$", page.read_text(), re.MULTILINE)
    records = [*SETTINGS, *OPTIONS]
    assert rows == [(f"--{record.option}", ", ".join(f"`{name}`" for name in record.same)) for record in records if record.same]


def test_names_of_other_engines_mean_one_setting():
    theirs = [name for setting in SETTINGS for name in (*setting.same, *setting.otherwise)]
    assert len(set(theirs)) == len(theirs)
    assert all(f"--{setting.option}" not in theirs for setting in SETTINGS)
