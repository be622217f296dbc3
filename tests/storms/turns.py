"""Conversations of several turns: each has the one before at its beginning, answers included."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from storms.target import Target

from npucompile.server.client import Client, raise_if_refused


@dataclass
class Turns:
    """What conversations found.

    Attributes:
        first_ms: of each turn, over all conversations, the time to its first token, by the server's record: text comes once tokens complete
            a character.
        found: tokens of the prompts of each turn that were cached, and tokens of the prompts.
        wrong: turns whose tokens were not those of a prompt that is computed whole.
    """

    first_ms: dict[int, list[float]] = field(default_factory=dict)
    found: dict[int, tuple[int, int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


async def converse(
    target: Target, conversations: int, turns: int, generator: random.Random, *, message: int = 24, answer: int = 64, vocab: int = 512
) -> Turns:
    """Runs conversations one turn of each after the other, so that others come between two turns of one.

    Args:
        message, answer: tokens of a message and of an answer.
        vocab: tokens of messages are below it.
    """
    found, said = Turns(), [[generator.randrange(vocab) for _ in range(message)] for _ in range(conversations)]
    async with await Client.connect(target.websocket) as client:
        for turn in range(turns):
            for prompt in said:
                tokens = await _turn(client, prompt, turn, answer, found)
                # The answer without its last token is what the server has computed; a template would add marks.
                prompt += [*tokens, *(generator.randrange(vocab) for _ in range(message))]
        for prompt in said[:2]:
            whole = len(prompt) - message - answer
            again = client.create(prompt[:whole], max_output_tokens=answer, ignore_eos=True, temperature=0, skip_reading_prefix_cache=True)
            tokens = list((await again.completion()).token_ids)
            if tokens != prompt[whole : whole + answer]:
                found.wrong.append(f"{prompt[whole : whole + answer]} behind what was cached, {tokens} without")
    return found


async def _turn(client: Client, prompt: list[int], turn: int, answer: int, found: Turns) -> list[int]:
    tokens: list[int] = []
    async for event in client.create(prompt, max_output_tokens=answer, ignore_eos=True, temperature=0):
        raise_if_refused(event)
        if event["type"] == "response.output_text.delta":
            tokens += event["token_ids"]
        if "response" in event and event["response"]["usage"]:
            usage, (cached, asked) = event["response"]["usage"], found.found.get(turn, (0, 0))
            found.first_ms.setdefault(turn, []).append(usage["npucompile"]["first_token_ms"])
            found.found[turn] = cached + usage["input_tokens_details"]["cached_tokens"], asked + usage["input_tokens"]
    return tokens
