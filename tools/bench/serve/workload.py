"""What is sent to a server: prompts that are drawn, or read from a file."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from ....graphs.errors import SpecError
from ....server.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class WorkloadPrompt:
    """One request of a load.

    Attributes:
        token_ids: of the prompt.
        output_tokens: most tokens to generate.
        text: of the prompt where it was given as text.
    """

    token_ids: tuple[int, ...]
    output_tokens: int
    text: str | None = None


class Vocabulary:
    """A tokenizer, and the ids that random prompts are drawn from: all but special ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.ids = [token_id for token_id in sorted(tokenizer.get_vocab(with_added_tokens=True).values()) if token_id not in special]

    @staticmethod
    def load(file: Path) -> Vocabulary:
        """Reads a tokenizer.json, or Kimi's tiktoken.model.

        Raises:
            ModelError: it is none.
        """
        return Vocabulary(TextTokenizer.load(file).library)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, with what the tokenizer adds around it."""
        return tuple(self._tokenizer.encode(text).ids)

    def draw(self, draw: random.Random, count: int) -> tuple[int, ...]:
        """Random ids, special ones excluded."""
        return tuple(draw.choices(self.ids, k=count))


def drawn(
    vocabulary: Vocabulary, count: int, prompt_tokens: int, output_tokens: int, range_ratio: float, seed: int
) -> tuple[WorkloadPrompt, ...]:
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
    return tuple(WorkloadPrompt(vocabulary.draw(draw, size), output) for size, output in sizes)


def read(vocabulary: Vocabulary, file: Path, count: int | None, output_tokens: int) -> tuple[WorkloadPrompt, ...]:
    """Prompts of a text file, one a line; empty lines are passed over, and the file is repeated until there are `count`.

    Raises:
        SpecError: the file has none.
    """
    texts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        raise SpecError(f"{file} has no prompt; legal is a file with one a line")
    wanted = len(texts) if count is None else count
    return tuple(WorkloadPrompt(vocabulary.encode(text), output_tokens, text) for text in (texts[i % len(texts)] for i in range(wanted)))
