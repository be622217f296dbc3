"""The bundled model's byte-level BPE tokenizer, and token windows for training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ....graphs.errors import SpecError
from .corpus import Chapter

VOCAB_SIZE = 2048
EOS = "<|endoftext|>"
SPECIALS = (EOS, "<|im_start|>", "<|im_end|>")

# The pre-tokenizer expression of the public Qwen2 and Qwen3 tokenizers.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A completion model has no turns: a conversation is its texts, one after another.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learns `vocab_size` ids: all 256 bytes, merges, and the special tokens as the last three. Every id decodes to text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS), show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def eos_id(tokenizer: Tokenizer) -> int:
    """The end-of-text id.

    Raises:
        SpecError: the tokenizer has none.
    """
    token_id: int | None = tokenizer.token_to_id(EOS)
    if token_id is None:
        raise SpecError(f"the tokenizer has no token {EOS!r}; it has {tokenizer.get_vocab_size()} others")
    return token_id


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json as `transformers.AutoTokenizer` reads them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "additional_special_tokens": list(SPECIALS[1:]),
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True)
class TokenStream:
    """Chapters as one stream of ids, each chapter ended by the end-of-text id.

    Attributes:
        ids: int64 [tokens].
        heads: ids of each verse as if it began a document, without the space that joins it to the verse before.
        ends: position in the stream where each verse's own ids end.
    """

    ids: torch.Tensor
    heads: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]

    @staticmethod
    def of(tokenizer: Tokenizer, chapters: Sequence[Chapter]) -> TokenStream:
        eos = eos_id(tokenizer)
        ids: list[int] = []
        heads: list[tuple[int, ...]] = []
        ends: list[int] = []
        for chapter in chapters:
            for index, verse in enumerate(chapter.verses):
                heads.append(tuple(tokenizer.encode(verse).ids))
                ids.extend(tokenizer.encode(" " + verse).ids if index else heads[-1])
                ends.append(len(ids))
            ids.append(eos)
        return TokenStream(torch.tensor(ids), tuple(heads), tuple(ends))

    def window(self, verse: int, length: int) -> torch.Tensor:
        """int64 [length]: the text from the beginning of a verse on; wraps around at the end."""
        head = torch.tensor(self.heads[verse][:length])
        rest = torch.arange(self.ends[verse], self.ends[verse] + length - len(head)) % len(self.ids)
        return torch.cat((head, self.ids[rest]))

    def batch(self, size: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """int64 [size, length]: windows from verses drawn at random."""
        verses = torch.randint(len(self.ends), (size,), generator=generator).tolist()
        return torch.stack([self.window(verse, length) for verse in verses])
