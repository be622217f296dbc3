"""Ids of calls in a conversation, as the templates of models read them that were trained with ids of one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from ..parsers.tool_calls import CallIds


def with_ids(messages: Sequence[Mapping[str, Any]], ids: CallIds) -> list[Mapping[str, Any]]:
    """The messages with legal ids: those that are legal stay, so that a prompt repeats what the model wrote, and others are made anew.

    Results have the ids of their calls; of several calls with one id, in turn.
    """
    shown: list[Mapping[str, Any]] = []
    used: set[str] = set()
    waiting: dict[Any, list[str]] = {}
    for message in messages:
        if message.get("tool_calls"):
            calls = [{**call, "id": _take(call, ids, used)} for call in message["tool_calls"]]
            waiting |= {call.get("id"): [] for call in message["tool_calls"]}
            for call, own in zip(message["tool_calls"], calls, strict=True):
                waiting[call.get("id")].append(own["id"])
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and (mine := waiting.get(message.get("tool_call_id"))):
            message = {**message, "tool_call_id": mine.pop(0) if len(mine) > 1 else mine[0]}
        shown.append(message)
    return shown


def _take(call: Mapping[str, Any], ids: CallIds, used: set[str]) -> str:
    """An id of a call that none before it has."""
    made = (ids.make(call["function"]["name"], number) for number in count(len(used)))
    own = call.get("id")
    if not isinstance(own, str) or not ids.legal.fullmatch(own):
        own = next(made)
    while own in used:
        own = next(made)
    used.add(own)
    return own
