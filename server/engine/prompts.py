"""Prompts of conversations, with pictures or without: read, counted and made token ids."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from ...graphs.errors import RequestError
from ...runtime.picture_spans import PictureInput
from ..chat.template import Chat
from ..pictures.processor import Picture
from ..pictures.prompt import encoded, guarded, inputs
from ..pictures.reader import NO_FIELDS, Count, PictureReader, count_of, tokens_of
from ..pictures.videos import Video
from ..requests.pictures import PicturePart, ProcessorFields
from .service import Service


@dataclass(frozen=True)
class Prompt:
    """A prompt of the engine.

    Attributes:
        pictures: of `Request`.
        text: that a chat template made.
    """

    token_ids: tuple[int, ...]
    pictures: tuple[PictureInput, ...] = ()
    text: str = ""


def reader_of(service: Service, parts: Sequence[PicturePart]) -> PictureReader:
    """What reads the pictures of a request.

    Raises:
        RequestError: this server takes none.
    """
    if service.pictures is None:
        param = parts[0].param
        message = f"{param} is a picture, and this server takes text alone: {service.without_pictures}"
        raise RequestError(message, param=param, code="unsupported_value")
    return service.pictures


@contextlib.asynccontextmanager
async def reading(
    service: Service, parts: Sequence[PicturePart], fields: ProcessorFields | None, client: str, completions: int = 1
) -> AsyncIterator[tuple[Picture | Video, ...]]:
    """The pictures and videos of a request, read. Their tokens hold places of the client for the length of the `with`, from before they are
    decoded: what waits for that is bounded by what may run.

    Args:
        fields: `mm_processor_kwargs` of the request.
        completions: of the prompt.

    Raises:
        RequestError: one of them is not legal, or there is no room.
    """
    if not parts:
        yield ()
        return
    reader = reader_of(service, parts)
    counts = await reader.counts(parts, fields or NO_FIELDS)
    tokens = sum(map(tokens_of, counts))
    if tokens >= service.model.max_model_len:
        raise service.too_long(f"{len(counts)} pictures of {tokens} tokens", parts[-1].param)
    with service.admission.reserved(client, completions, completions * tokens):
        yield await reader.pictures(parts, fields or NO_FIELDS)


async def counted(service: Service, parts: Sequence[PicturePart], fields: ProcessorFields | None) -> tuple[Count, ...]:
    """What stands for the pictures and videos of a request, none of which is decoded.

    Raises:
        RequestError: one of them is not legal.
    """
    return await reader_of(service, parts).counts(parts, fields or NO_FIELDS) if parts else ()


def rendered(
    service: Service, chat: Chat, counts: Sequence[Count], param: str, *, add_special: bool = False, bounded: bool = True
) -> tuple[str, tuple[int, ...]]:
    """Text and token ids of a conversation, with the places of its pictures.

    Args:
        counts: what stands for each picture and video.
        param: the field of the conversation, for errors.
        bounded: whether they have to fit into the context.

    Raises:
        RequestError: the template refuses the conversation or leaves a picture out, or the prompt cannot be served.
    """

    def encode(pieces: Sequence[str], places: int) -> list[tuple[int, ...]]:
        if bounded:
            return service.encode_pieces(pieces, places, param, add_special=add_special)
        return [service.tokenizer.encode(piece, add_special=add_special and not index) for index, piece in enumerate(pieces)]

    if service.pictures is None:
        text = service.chat.render(chat)
        (ids,) = encode([text], 0)
    else:
        vision, safe = service.pictures.vision, guarded(chat, service.pictures.vision)
        text = service.chat.render(safe.chat)
        ids = encoded(text, safe.guard, counts, vision, encode, param)
        text = text.replace(safe.guard, "") if safe.guard else text
    return text, service.checked(ids, param) if bounded else ids


def prompt_of(service: Service, chat: Chat, pictures: Sequence[Picture | Video], param: str) -> Prompt:
    """The prompt of a conversation; raises what `rendered` does."""
    text, ids = rendered(service, chat, [count_of(picture) for picture in pictures], param)
    return Prompt(ids, with_pictures(service, ids, pictures), text)


def with_pictures(service: Service, token_ids: tuple[int, ...], pictures: Sequence[Picture | Video]) -> tuple[PictureInput, ...]:
    """The pictures of token ids that have their places."""
    return inputs(token_ids, pictures, service.pictures.vision) if service.pictures is not None and pictures else ()
