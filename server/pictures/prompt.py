"""Where the pictures of a request stand in its prompt: the places that the template gives them, as many tokens as each has rows.

What users typed is guarded before the template sees it, so that every mark of a place in its text is the template's own: a private
character (U+E000 to U+F8FF) stands within each mark that a user typed, and text is encoded piece by piece between such characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...graphs.errors import RequestError
from ...runtime.picture_spans import PictureInput, spans
from ..chat.template import Chat
from .processor import Picture
from .reader import Count, Vision
from .videos import Video

GUARDS = range(0xE000, 0xF900)


@dataclass(frozen=True)
class Guarded:
    """A conversation whose texts have no marks of pictures.

    Attributes:
        guard: stands within the marks that they had; "" where they had none.
    """

    chat: Chat
    guard: str = ""


def guarded(chat: Chat, vision: Vision) -> Guarded:
    """A conversation with a guard within each mark of a picture in its messages, tools and variables."""
    marks = re.compile("|".join(map(re.escape, vision.marks)))
    values = [chat.messages, chat.tools, chat.variables]
    texts = list(_texts(values))
    if not any(map(marks.search, texts)):
        return Guarded(chat)
    taken = set("".join(texts))
    guard = next((chr(code) for code in GUARDS if chr(code) not in taken), None)
    if guard is None:
        message = f"the messages have a mark of a picture, such as {vision.image}, and all private characters; legal is one of both"
        raise RequestError(message, param="messages")

    def split(value: Any) -> Any:
        if isinstance(value, str):
            return marks.sub(lambda mark: f"{mark[0][0]}{guard}{mark[0][1:]}", value)
        if isinstance(value, dict):
            return {split(name): split(entry) for name, entry in value.items()}
        return [split(entry) for entry in value] if isinstance(value, list | tuple) else value

    messages, tools, variables = split(values)
    return Guarded(replace(chat, messages=messages, tools=tools, variables=variables), guard)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield from _texts(name)
            yield from _texts(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry)


Encode = Callable[[Sequence[str], int], list[tuple[int, ...]]]
"""(pieces of text, tokens between them) -> the token ids of each piece; raises RequestError where they are too many."""


def encoded(text: str, guard: str, counts: Sequence[Count], vision: Vision, encode: Encode, param: str) -> tuple[int, ...]:
    """Token ids of a text that has one mark of an image for each picture, and for each video a mark between those of start and end.

    The three of a video give way to what stands for each pair of its frames: when it is seen, start, its tokens, and end.

    Args:
        guard: of `Guarded`; leaves the text.
        counts: tokens of each picture and video.
        param: the field of the prompt, for errors.

    Raises:
        RequestError: the text has more or fewer marks.
    """
    start, end = vision.start, vision.end
    first, *rest = re.split(f"({re.escape(vision.image)}|{re.escape(start + vision.video + end)})", text)
    marks, between = rest[::2], rest[1::2]
    _check_count(marks.count(vision.image), sum(isinstance(count, int) for count in counts), vision, param)
    if [mark == vision.image for mark in marks] != [isinstance(count, int) for count in counts]:
        message = (
            f"{param} has other places for videos ({vision.video}), or in another order, than the request has videos; legal is one for each"
        )
        raise RequestError(message, param=param, code="invalid_video")

    def split(piece: str) -> list[str]:
        return piece.split(guard) if guard else [piece]

    pieces, places = [split(first)], list[tuple[int, int]]()
    for count, piece in zip(counts, between, strict=True):
        if isinstance(count, int):
            places.append((vision.image_token_id, count))
            pieces.append(split(piece))
            continue
        # Apart from the text before it, as vLLM encodes it.
        pieces[-1].append(count.texts[0] + start)
        pieces += [[end + text + start] for text in count.texts[1:]] + [split(end + piece)]
        places += [(vision.video_token_id, count.each)] * len(count.texts)
    ids = iter(encode([part for piece in pieces for part in piece], sum(number for _, number in places)))
    tokens: list[int] = []
    for piece, (mark, number) in zip(pieces, [*places, (0, 0)], strict=True):
        for _ in piece:
            tokens += next(ids)
        tokens += [mark] * number
    return tuple(tokens)


def expanded(tokens: Sequence[int], counts: Sequence[int], vision: Vision, param: str) -> tuple[int, ...]:
    """Token ids with as many places for each picture as it has tokens, of ids that have one place for each.

    Raises:
        RequestError: they have more or fewer places.
    """
    mark = vision.image_token_id
    _check_count(sum(token == mark for token in tokens), len(counts), vision, param)
    left = iter(counts)
    return tuple(place for token in tokens for place in ([mark] * next(left) if token == mark else [token]))


def in_order(text: str, shown: Sequence[Picture | Video], vision: Vision) -> list[Picture | Video]:
    """Pictures and videos in the order of a text's marks of them, in which each kind has its own; those that have no mark come last."""
    kinds = ((vision.image, Picture), (vision.video, Video))
    left = {mark: [each for each in shown if isinstance(each, kind)] for mark, kind in kinds}
    marks = re.findall("|".join(map(re.escape, left)), text)
    return [left[mark].pop(0) for mark in marks if left[mark]] + [each for own in left.values() for each in own]


def inputs(tokens: Sequence[int], shown: Sequence[Picture | Video], vision: Vision) -> tuple[PictureInput, ...]:
    """The pictures of a prompt, and the pairs of frames of its videos, as an engine takes them."""
    grids = {vision.image_token_id: [each.grid for each in shown if isinstance(each, Picture)]}
    if pairs := [pair.picture.grid for each in shown if isinstance(each, Video) for pair in each.pairs]:
        grids[vision.video_token_id] = pairs
    segments = [picture for each in shown for picture in ([each] if isinstance(each, Picture) else [pair.picture for pair in each.pairs])]
    places = spans(tokens, grids, vision.processor.merge_size)
    return tuple(
        PictureInput(span, picture.pixels.numpy(), picture.grid[1:], picture.digest) for span, picture in zip(places, segments, strict=True)
    )


def _check_count(marks: int, pictures: int, vision: Vision, param: str) -> None:
    if marks != pictures:
        message = f"{param} has {marks} places for pictures ({vision.image}), and the request has {pictures}; legal is one for each"
        raise RequestError(message, param=param, code="invalid_image")
