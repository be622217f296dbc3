"""Small tokenizers, and the oracle for stop strings."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from npucompile.runtime.request import ExecutionRecord
from npucompile.server.text.tokenizer import TextTokenizer

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


def word_pieces(*added: str) -> Tokenizer:
    """Pieces of words with blanks before them and bytes for all else, as SentencePiece has them; and tokens that are not special."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abc<>/s", "▁a", "▁c", "ab", "▁ca", "▁cab"]
    merges = [("▁", "a"), ("▁", "c"), ("a", "b"), ("▁c", "a"), ("▁ca", "b")]
    tokenizer = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text up to the first completed stop string when characters come one by one, and whether there is one."""
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            return text[: end - max(map(len, matched))], True
    return text, False
