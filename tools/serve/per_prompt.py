"""How many pictures and videos a request may have, as vLLM and SGLang write it: `image=4,video=0`, or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ...graphs.errors import SpecError

KINDS = ("image", "video")
COUNT = "count"
"""Where vLLM's JSON has an object for a kind."""


def read_per_prompt(text: str) -> Mapping[str, int]:
    """Numbers by kind.

    Raises:
        SpecError: it is of another form.
    """
    try:
        limits = json.loads(text) if text.lstrip().startswith("{") else dict(part.split("=") for part in text.split(","))
        counts = {kind: int(limit[COUNT] if isinstance(limit, dict) else limit) for kind, limit in limits.items()}
        legal = set(counts) <= set(KINDS) and min(counts.values(), default=0) >= 0
    except (ValueError, TypeError, KeyError, AttributeError):
        legal = False
    if not legal:
        form = 'image=N,video=M or {"image": N, "video": M}, each a whole number of at least 0'
        raise SpecError(f"--limit-mm-per-prompt is {text!r}; legal is {form}")
    return counts
