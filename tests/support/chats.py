"""Chats with a server of tests (`shown.showing`) by openai's client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from support.shown import codec


def text(value: str) -> dict[str, str]:
    """A part of a chat's message."""
    return {"type": "text", "text": value}


def ask(client: Any, *content: Any, **options: Any) -> Any:
    """The completion of a chat of one message of these parts, by openai's client."""
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": list(content)}], **options)


def refused(client: Any, *content: Any, **options: Any) -> openai.BadRequestError:
    """The error of a chat that is answered 400."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, *content, **options)
    return caught.value


def prompt_of(engine: Any) -> str:
    """The prompt that came last, with one mark for each place of a picture or a pair of frames."""
    return codec().decode(engine.requests[-1].prompt, skip_special=False)
