"""Prompts with pictures of files, for `generate`: pictures stand before the text, as the checkpoint's chat template writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact
from ...runtime.picture_spans import PictureInput
from ...server.chat.template import Chat
from ...server.pictures.decoding import decode
from ...server.pictures.limits import MOST_PIXELS, PictureLimits
from ...server.pictures.processor import Picture
from ...server.pictures.prompt import before_text, encoded, expanded, guarded, inputs
from ...server.pictures.reader import Vision
from ...server.text.tokenizer import TextTokenizer
from .api_settings import ApiSettings
from .vision import vision_of

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
    vision = "it has no tokenizer; legal is a prompt without --image" if codec is None else vision_of(artifact, codec)
    if codec is None or isinstance(vision, str):
        raise SpecError(f"--image {files[0]}, and {artifact.path} takes text alone: {vision}")
    pictures = [_picture(file, vision) for file in files]
    counts = [picture.tokens for picture in pictures]
    if isinstance(prompt, str):
        ids = _text_ids(artifact, codec, prompt, counts, vision)
    else:
        ids = expanded(prompt, counts, vision, "--token-ids")
    return ids, inputs(ids, pictures, vision)


def _text_ids(artifact: Artifact, codec: TextTokenizer, prompt: str, counts: Sequence[int], vision: Vision) -> tuple[int, ...]:
    form = ApiSettings().chat_of(artifact)

    def encode(pieces: Sequence[str], _: int) -> list[tuple[int, ...]]:
        # What the tokenizer adds is in a template's text already.
        return [codec.encode(piece, add_special=form.template is None and not index) for index, piece in enumerate(pieces)]

    content = [{"type": "image"} for _ in counts] + [{"type": "text", "text": prompt}]
    safe = guarded(Chat([{"role": "user", "content": content}]), vision)
    if form.template is not None:
        return encoded(form.render(safe.chat), safe.guard, counts, vision, encode, "--prompt")
    text = before_text(safe.chat.messages[0]["content"][-1]["text"], len(counts), vision)
    return encoded(text, safe.guard, counts, vision, encode, "--prompt")


def _picture(file: Path, vision: Vision) -> Picture:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise SpecError(f"--image {file}: cannot be read: {error.strerror}; legal is a file with a picture") from None
    picture = vision.processor.picture(decode(data, LIMITS, str(file)), str(file))
    vision.check_patches(len(picture.pixels), f"{file}", str(file))
    return picture
