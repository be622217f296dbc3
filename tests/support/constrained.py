"""Requests under constraints, run to their ends by an engine, and what transformers generates under the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from support import tiny
from support.toy_device import Collector, finished

from npucompile.runtime.constraint import Bitmask, Constraint
from npucompile.runtime.engine import Engine
from npucompile.runtime.executor import Executor
from npucompile.runtime.request import Request

PROMPTS = [b"In the beginning", b"a", b"And it came to pass", b"the", b"zz"]
TOKENS, BITMASKS = 16, 2


class Automaton:
    """A constraint by a function of the output: after each one, the tokens that may follow."""

    def __init__(self, legal: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self.legal = legal
        self.asked: list[tuple[int, ...]] = []

    def fill(self, output: Sequence[int], drafts: Sequence[int], bitmask: Bitmask) -> None:
        self.asked.append(tuple(output))
        for place in range(len(drafts) + 1):
            bits = np.zeros(bitmask.shape[1] * 32, bool)
            bits[list(self.legal([*output, *drafts[:place]]))] = True
            bitmask[place] = np.packbits(bits, bitorder="little").view(np.int32)


def turns(output: Sequence[int]) -> list[int]:
    """Three letters, then two digits, and so on: what may follow depends on where the output stands."""
    return [*range(ord("a"), ord("z") + 1)] if len(output) % 5 < 3 else [*range(ord("0"), ord("9") + 1)]


def rising(output: Sequence[int]) -> list[int]:
    """Never a smaller byte than the last; the largest, or the end."""
    return [*range(output[-1] if output else 40, 256), tiny.EOS]


@torch.no_grad()
def expected(theirs: Any, prompt: bytes, legal: Callable[[Sequence[int]], Sequence[int]], **changed: Any) -> list[int]:
    """Greedy tokens of transformers, the end-of-sequence token left out."""
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": tiny.EOS, "pad_token_id": 0, **changed}
    found = theirs.generate(ids, prefix_allowed_tokens_fn=lambda _, seen: list(legal(seen[len(prompt) :].tolist())), **options)
    tokens = found[0, len(prompt) :].tolist()
    return tokens[: tokens.index(tiny.EOS)] if tiny.EOS in tokens else tokens


def run(executor: Executor, requests: Sequence[Request], run_ahead: int | None = None) -> list[Collector]:
    return finished(Engine(executor, run_ahead=run_ahead), requests)


def asking(prompt: bytes, constraint: Constraint | None = None, name: str = "", **options: Any) -> Request:
    fields: dict[str, Any] = {"max_tokens": TOKENS, "stop_token_ids": frozenset([tiny.EOS]), **options}
    return Request(name or prompt.decode(), tuple(prompt), constraint=constraint, **fields)
