"""Small tokenizers, and the oracle for stop strings."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from npucompile.runtime.request import ExecutionRecord
from npucompile.server.tokenizer import TextTokenizer

TEXT = "In the beginning God created the heaven and the earth. Über naïve façade, 日本語の文章, Ω≈ç, 🙂👩‍👩‍👧 and 𝔘𝔫𝔦."
RECORD = ExecutionRecord(0.0, 1.0, 2.0, (), (), 0, 0)
"""What the engine recorded of a request, where a test does not care."""


def byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """One token per byte: ids are positions in the sorted alphabet, and a character of several bytes is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return byte_level(models.BPE({char: i for i, char in enumerate(alphabet)}, []))


@cache
def byte_codec() -> TextTokenizer:
    return TextTokenizer(byte_tokenizer())


def trained_tokenizer() -> Tokenizer:
    """400 tokens trained on TEXT: every byte, merges of bytes, and the special token <|end|> with id 0."""
    tokenizer = byte_level(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text up to the first completed stop string when characters come one by one, and whether there is one."""
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            return text[: end - max(map(len, matched))], True
    return text, False
