"""Prompts with pictures of files, for `generate`: pictures stand before the text, as the checkpoint's chat template writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact
from ...runtime.picture_spans import PictureInput
from ...server.chat.template import Chat
from ...server.pictures.decoding import decode
from ...server.pictures.limits import MOST_PIXELS, PictureLimits
from ...server.pictures.processor import Picture
from ...server.pictures.prompt import encoded, expanded, guarded, inputs
from ...server.pictures.reader import Vision
from ...server.text.tokenizer import TextTokenizer
from .api_settings import ApiSettings
from .vision import ids_of, tower_of, vision_of

LIMITS = PictureLimits(2**31 - 1, MOST_PIXELS)
"""The files are the user's own."""


def prompt_of(
    artifact: Artifact, codec: TextTokenizer | None, prompt: str | Sequence[int], files: Sequence[Path]
) -> tuple[tuple[int, ...], tuple[PictureInput, ...]]:
    """Token ids and pictures of a prompt.

    Args:
        prompt: a text, or token ids with one place for each picture.
        files: of the pictures.

    Raises:
        SpecError: the artifact takes no pictures, or a file cannot be read.
        RequestError: a file is no legal picture, or the chat template leaves it out.
    """
    tower = tower_of(artifact)
    if isinstance(tower, str):
        raise SpecError(f"--image {files[0]}, and {artifact.path} takes text alone: {tower}")
    pictures = [_picture(file, tower) for file in files]
    counts = [picture.tokens for picture in pictures]
    if not isinstance(prompt, str):
        ids = expanded(prompt, counts, tower, "--token-ids")
        return ids, inputs(ids, pictures, tower)
    assert codec is not None, "a text has become a prompt by a tokenizer"
    form = ApiSettings().chat_of(artifact)
    if form.template is None:
        front, behind = _before_text(codec, prompt, counts, ids_of(artifact))
        # What users type is no place, whatever its ids.
        return front + behind, inputs(front, pictures, tower)
    vision = vision_of(artifact, codec)
    if isinstance(vision, str):
        raise SpecError(f"--image {files[0]} with the chat template of {artifact.path}: {vision}")

    def encode(pieces: Sequence[str], _: int) -> list[tuple[int, ...]]:
        # What the tokenizer adds is in a template's text already.
        return [codec.encode(piece, add_special=False) for piece in pieces]

    content = [{"type": "image"} for _ in files] + [{"type": "text", "text": prompt}]
    safe = guarded(Chat([{"role": "user", "content": content}]), vision)
    ids = encoded(form.render(safe.chat), safe.guard, counts, vision, encode, "--prompt")
    return ids, inputs(ids, pictures, vision)


def _before_text(
    codec: TextTokenizer, prompt: str, counts: Sequence[int], ids: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer adds before a text, with the pictures behind that, and the text."""
    image, _, start, end = ids.values()
    places = tuple(token for count in counts for token in (start, *[image] * count, end))
    whole, text = codec.encode(prompt), codec.encode(prompt, add_special=False)
    added = len(whole) - len(text)
    return (whole[:added] + places, text) if whole[added:] == text else (places, whole)


def _picture(file: Path, vision: Vision) -> Picture:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise SpecError(f"--image {file}: cannot be read: {error.strerror}; legal is a file with a picture") from None
    picture = vision.processor.picture(decode(data, LIMITS, str(file)), str(file))
    vision.check_patches(len(picture.pixels), f"{file}", str(file))
    return picture
