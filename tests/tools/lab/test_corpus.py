"""tools/lab/corpus.py: verses become chapters, and chapters are split into training and held-out text."""

import shutil

import pytest

from npucompile.tools.lab import corpus
from npucompile.tools.lab.corpus import Chapter, CorpusError, parse_chapters, split_chapters

PRINTED = """Ge1:1 In the beginning God created the heaven and the earth.
Ge1:2 And the earth was without form,  and void; and darkness was upon the face of the deep.
Ge2:1 Thus the heavens and the earth were finished, and all the host of them.
1Sm1:1 Now there was a certain man of Ramathaimzophim, (of mount Ephraim,) and his name was Elkanah.
"""
CHAPTERS = parse_chapters(PRINTED)


def test_labels_are_dropped_and_verses_gathered():
    assert [chapter.name for chapter in CHAPTERS] == ["Ge 1", "Ge 2", "1Sm 1"]
    assert CHAPTERS[0].text == (
        "In the beginning God created the heaven and the earth. "
        "And the earth was without form, and void; and darkness was upon the face of the deep."
    )


@pytest.mark.parametrize("line, says", [("no label here", "label"), ("Ge1:2 second first", "verse 1"), ("Ge1:1 ", "label"), ("", "label")])
def test_malformed_lines_are_refused_by_number(line, says):
    with pytest.raises(CorpusError, match=f"line 2 .*{says}"):
        parse_chapters("Exo1:1 fine\n" + line + "\n")


def test_split_depends_on_position_alone():
    chapters = [Chapter("Ge", i, (f"verse {i}",)) for i in range(260)]
    training, held_out = split_chapters(chapters)
    assert [chapter.number for chapter in held_out] == [25, 75, 125, 175, 225]
    assert sorted(chapter.number for chapter in training + held_out) == list(range(260))


@pytest.mark.parametrize(
    ("command", "says"),
    [(("no-such-command-here",), "apt-get install bible-kjv"), (("sh", "-c", "echo no such book >&2; exit 3"), "status 3: no such book")],
)
def test_a_command_that_is_missing_or_fails_is_an_error(monkeypatch, command, says):
    monkeypatch.setattr(corpus, "COMMAND", command)
    with pytest.raises(CorpusError, match=says):
        corpus.read_bible()


@pytest.mark.skipif(shutil.which("bible") is None, reason="package bible-kjv is not installed")
def test_whole_text_parses():
    chapters = parse_chapters(corpus.read_bible())
    assert (len(chapters), sum(len(chapter.verses) for chapter in chapters)) == (1189, 31102)
    _, held_out = split_chapters(chapters)
    share = sum(len(c.text) for c in held_out) / sum(len(c.text) for c in chapters)
    assert len(held_out) == 24
    assert 0.015 < share < 0.025
