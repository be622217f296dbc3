"""server/pictures/prompt.py: marks of the template, and none of what users type."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.shown import END, FORM, IMAGE, IMAGE_ID, MARKS, PLACE, START, VIDEO, VISION, codec

from npucompile.graphs.errors import RequestError
from npucompile.runtime.picture_spans import spans
from npucompile.server.chat.template import Chat
from npucompile.server.pictures.processor import Picture
from npucompile.server.pictures.prompt import encoded, expanded, guarded, inputs
from npucompile.server.pictures.reader import VideoFrames

TYPED = st.lists(st.sampled_from([*MARKS, "<|image_", "pad|>", "a", " ", "\ue000", "é", "<", ">"]), max_size=6).map("".join)


def encode(pieces, _):
    return [codec().encode(piece, add_special=False) for piece in pieces]


def test_a_video_s_marks_give_way_to_those_of_its_frames_each_apart_from_the_text_before():
    asked: list[str] = []

    def listening(pieces, places):
        asked.extend(pieces)
        return encode(pieces, places)

    place = f"{START}{VIDEO}{END}"
    counts = [VideoFrames(("<0.1 seconds>", "<0.9 seconds>"), 4), 2]
    ids = encoded(f"a {place} b{START}{IMAGE}{END}", "", counts, VISION, listening, "messages")
    pair = f"{START}{VIDEO * 4}{END}"
    expected = f"a <0.1 seconds>{pair}<0.9 seconds>{pair} b{START}{IMAGE * 2}{END}"
    assert codec().decode(ids, skip_special=False) == expected
    assert asked[:3] == ["a ", f"<0.1 seconds>{START}", f"{END}<0.9 seconds>{START}"]
    for wrong in (counts[::-1], counts[1:], [*counts, counts[0]], [1, 2]):
        with pytest.raises(RequestError, match="legal is one for each"):
            encoded(f"a {place} b{START}{IMAGE}{END}", "", wrong, VISION, encode, "messages")


@given(st.lists(st.one_of(TYPED, st.none()), min_size=1, max_size=6))
def test_places_are_those_of_the_list_whatever_users_type(parts):
    """Text that is typed is encoded as its bytes, and each picture has its places where it stands among it."""
    content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    counts = [3 + number for number in range(parts.count(None))]
    safe = guarded(Chat([{"role": "user", "content": content}]), VISION)
    try:
        ids = encoded(FORM.render(safe.chat), safe.guard, counts, VISION, encode, "messages")
    except RequestError:
        # Halves of a mark that two parts join to one cannot be told from the template's.
        joined = "".join("\0" if part is None else part for part in parts)
        assert joined.count(IMAGE) > sum(part.count(IMAGE) for part in parts if part)
        return
    left, shown = iter(counts), list[str]()
    for part in parts:
        shown.append(f"{START}{IMAGE * next(left)}{END}" if part is None else part)
    expected = "".join(shown).strip()
    assert codec().decode(ids, skip_special=False) == f"<|im_start|>user\n{expected}<|im_end|>\n<|im_start|>assistant\n"
    assert sum(token == IMAGE_ID for token in ids) == sum(counts)
    assert len(spans(ids, {IMAGE_ID: [(1, 2, 2 * count) for count in counts]}, 2)) == len(counts)


def test_every_text_of_a_conversation_is_guarded():
    call = {"function": {"name": "f", "arguments": {IMAGE: [IMAGE, 1, None, True]}}}
    messages = [{"role": "assistant", "content": IMAGE, "tool_calls": [call], "reasoning_content": START}]
    safe = guarded(Chat(messages, tools=[{"name": END}], variables={"x": {"y": PLACE}}), VISION)
    assert safe.guard
    shown = repr((safe.chat.messages, safe.chat.tools, safe.chat.variables))
    assert not any(mark in shown for mark in MARKS)
    assert shown.replace(repr(safe.guard)[1:-1], "") == repr((messages, [{"name": END}], {"x": {"y": PLACE}}))


def test_a_conversation_without_marks_is_left_as_it_is():
    chat = Chat([{"role": "user", "content": "pad|>"}])
    assert guarded(chat, VISION).chat is chat


def test_a_guard_is_a_character_that_nobody_typed():
    typed = "".join(map(chr, range(0xE000, 0xF8FF)))
    assert guarded(Chat([{"role": "user", "content": typed + IMAGE}]), VISION).guard == "\uf8ff"
    with pytest.raises(RequestError, match="all private characters"):
        guarded(Chat([{"role": "user", "content": typed + "\uf8ff" + IMAGE}]), VISION)


@pytest.mark.parametrize("counts", [[], [1], [1, 2, 3]])
def test_more_or_fewer_pictures_than_places_are_refused(counts):
    for made in (
        lambda: encoded(f"a{IMAGE}b{IMAGE}", "", counts, VISION, encode, "text"),
        lambda: expanded([1, IMAGE_ID, 2, IMAGE_ID], counts, VISION, "text"),
    ):
        with pytest.raises(RequestError, match=rf"text has 2 places .* has {len(counts)}") as caught:
            made()
        assert (caught.value.code, caught.value.param) == ("invalid_image", "text")


def test_token_ids_are_expanded_as_text_is():
    text = f"{PLACE}{PLACE}x"
    ids = encoded(text, "", [2, 3], VISION, encode, "text")
    assert ids == expanded(codec().encode(text), [2, 3], VISION, "text")
    assert codec().decode(ids, skip_special=False) == f"{START}{IMAGE * 2}{END}{START}{IMAGE * 3}{END}x"


def test_equal_bytes_of_another_shape_are_another_picture():
    """CVE-2025-46722: 30x100 is not 100x30."""
    pixels = torch.zeros(8, 768, dtype=torch.uint8)
    wide, tall = (Picture(pixels, grid, 2) for grid in ((1, 2, 4), (1, 4, 2)))
    ids = encoded(PLACE + "x", "", [2], VISION, encode, "text")
    (one,), (two,) = inputs(ids, [wide], VISION), inputs(ids, [tall], VISION)
    assert one.digest != two.digest
    assert (one.span.rows, one.span.columns, one.grid) == (1, 2, (2, 4))
    assert (two.span.rows, two.span.columns, two.grid) == (2, 1, (4, 2))
