"""What is sent to a server: prompts that are drawn, read from a trace, or read from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ....graphs.errors import ModelError, SpecError

TRACE_BLOCK = 512
"""Tokens of a block that `hash_ids` of a trace name; the last block of a prompt may have fewer."""


@dataclass(frozen=True)
class Prompt:
    """One request of a load.

    Attributes:
        token_ids: of the prompt.
        output_tokens: most tokens to generate.
        text: of the prompt where it was given as text.
        at_s: when it arrives, if the load says so itself.
    """

    token_ids: tuple[int, ...]
    output_tokens: int
    text: str | None = None
    at_s: float | None = None


class Vocabulary:
    """A tokenizer, and the ids that random prompts are drawn from: all but special ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.ids = [token_id for token_id in sorted(tokenizer.get_vocab(with_added_tokens=True).values()) if token_id not in special]

    @staticmethod
    def load(file: Path) -> Vocabulary:
        """Reads a tokenizer.json.

        Raises:
            ModelError: it is none.
        """
        try:
            return Vocabulary(Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{file} is not a tokenizer.json: {error}") from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, with what the tokenizer adds around it."""
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids; encoded again it may have another number of tokens."""
        return str(self._tokenizer.decode(list(token_ids)))

    def draw(self, draw: random.Random, count: int) -> tuple[int, ...]:
        """Random ids, special ones excluded."""
        return tuple(draw.choices(self.ids, k=count))


def drawn(vocabulary: Vocabulary, count: int, prompt_tokens: int, output_tokens: int, range_ratio: float, seed: int) -> tuple[Prompt, ...]:
    """Prompts of random ids. Both lengths are uniform between (1 - range_ratio) and (1 + range_ratio) times the given ones, at least 1.

    Raises:
        SpecError: a ratio outside 0 to 1.
    """
    if not 0 <= range_ratio < 1:
        raise SpecError(f"--random-range-ratio is {range_ratio}; legal is from 0, which means exact lengths, to below 1")
    draw = random.Random(seed)

    def length(mean: int) -> int:
        return draw.randint(max(1, int(mean * (1 - range_ratio))), max(1, int(mean * (1 + range_ratio))))

    sizes = [(length(prompt_tokens), length(output_tokens)) for _ in range(count)]
    return tuple(Prompt(vocabulary.draw(draw, size), output) for size, output in sizes)


def shared_prefix(
    vocabulary: Vocabulary, *, groups: int, per_group: int, system_tokens: int, question_tokens: int, output_tokens: int, seed: int
) -> tuple[Prompt, ...]:
    """Groups of prompts that begin with the same system prompt, each with a question of its own, in shuffled order."""
    draw = random.Random(seed)
    prompts = []
    for _ in range(groups):
        system = vocabulary.draw(draw, system_tokens)
        prompts += [Prompt(system + vocabulary.draw(draw, question_tokens), output_tokens) for _ in range(per_group)]
    draw.shuffle(prompts)
    return tuple(prompts)


def traced(vocabulary: Vocabulary, file: Path, count: int | None, seed: int) -> tuple[Prompt, ...]:
    """Requests of a trace in Mooncake's format: a JSON object a line with `timestamp` (ms), `input_length`, `output_length`, and
    optionally `hash_ids`, which name blocks of 512 tokens: equal ids become equal tokens, so that prefixes are shared as they were.

    Args:
        count: the first so many lines; None takes all.

    Raises:
        SpecError: naming the line that is no request, or a file without any.
    """
    prompts: list[Prompt] = []
    draw = random.Random(seed)
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    for number, line in enumerate(lines, start=1):
        entry = _entry(line, f"{file}:{number}")
        size, hashes = entry["input_length"], entry.get("hash_ids")
        if hashes is None:
            token_ids = vocabulary.draw(draw, size)
        else:
            blocks = [vocabulary.draw(random.Random(f"{seed}/{name}"), TRACE_BLOCK) for name in hashes]
            token_ids = tuple(token for block in blocks for token in block)[:size]
            # A trace may name fewer blocks than the prompt has.
            token_ids += vocabulary.draw(draw, size - len(token_ids))
        prompts.append(Prompt(token_ids, entry["output_length"], at_s=entry["timestamp"] / 1e3))
    if not prompts:
        raise SpecError(f"{file} has no request; legal is a JSON object a line with timestamp, input_length and output_length")
    first = min(prompt.at_s or 0.0 for prompt in prompts)
    shifted = (Prompt(p.token_ids, p.output_tokens, at_s=(p.at_s or 0.0) - first) for p in prompts)
    return tuple(sorted(shifted, key=lambda prompt: prompt.at_s or 0.0))


def _entry(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise SpecError(f"{where} is not JSON: {error}; legal is an object a line") from None
    checks: dict[str, Callable[[Any], bool]] = {
        "timestamp": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value >= 0,
        "input_length": lambda value: type(value) is int and value >= 1,
        "output_length": lambda value: type(value) is int and value >= 1,
        "hash_ids": lambda value: value is None or (isinstance(value, list) and all(type(name) is int for name in value)),
    }
    for name, legal in checks.items():
        value = entry.get(name) if isinstance(entry, dict) else entry
        if not isinstance(entry, dict) or not legal(value):
            wanted = "timestamp in ms from 0, input_length and output_length from 1, and hash_ids, whole numbers, or none"
            raise SpecError(f"{where}: {name} is {value!r}; legal is an object with {wanted}")
    return dict(entry)


def read(vocabulary: Vocabulary, file: Path, count: int | None, output_tokens: int) -> tuple[Prompt, ...]:
    """Prompts of a text file, one a line; empty lines are passed over, and the file is repeated until there are `count`.

    Raises:
        SpecError: the file has none.
    """
    texts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        raise SpecError(f"{file} has no prompt; legal is a file with one a line")
    wanted = len(texts) if count is None else count
    return tuple(Prompt(vocabulary.encode(text), output_tokens, text) for text in (texts[i % len(texts)] for i in range(wanted)))
