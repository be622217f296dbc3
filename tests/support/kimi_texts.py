"""A tokenizer in the files that Kimi's checkpoints have, trained here, and what tiktoken makes of them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import tiktoken
from support.family_templates import FAMILIES
from support.texts import TEXT
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from npucompile.server.text.token_text import spelt_bytes

ROOT = Path(__file__).parents[2]
# As tokenization_kimi.py of moonshotai/Kimi-K2-Instruct writes it.
LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PIECES = [
    r"""[\p{Han}]+""",
    rf"""[^\r\n\p{{L}}\p{{N}}]?{LETTERS[0]}*{LETTERS[1]}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    rf"""[^\r\n\p{{L}}\p{{N}}]?{LETTERS[0]}+{LETTERS[1]}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
    r"""\s*[\r\n]+""",
    r"""\s+(?!\S)""",
    r"""\s+""",
]
FLAGS = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
CONFIG = {
    "tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "additional_special_tokens": ["<|im_end|>", "<|im_user|>"],
}  # fmt: skip
CODE = f"import tiktoken\n\nclass TikTokenTokenizer(Base):\n    pat_str = '|'.join(\n        {PIECES!r}\n    )\n\nraise SystemExit('run')\n"
RESERVED = 256


def ranks(count: int) -> list[bytes]:
    """Tokens by their ranks: all bytes, and what pairs of them make in texts of this repository."""
    tokenizer = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Split(Regex("|".join(PIECES)), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=count, initial_alphabet=alphabet, show_progress=False)
    files = (ROOT / "README.md", ROOT / "docs" / "architecture.md", Path(__file__))
    tokenizer.train_from_iterator(
        [*(file.read_text(encoding="utf-8") for file in files), *[f"{TEXT} 你好，世界。人工智能  \n\n"] * 9], trainer
    )
    names = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [spelt_bytes(name) or b"" for name, _ in names]


def write_tokenizer(directory: Path, count: int = 1000, **changes: object) -> tiktoken.Encoding:
    """Writes the files; tiktoken's reader of them, with the special tokens as Kimi's own reader names them."""
    tokens, family = ranks(count), FAMILIES["Kimi-K2.5"]
    directory.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_text("".join(lines))
    marks = {"[BOS]": 0, "[EOS]": 1, "[PAD]": RESERVED - 1} | {mark: 2 * i + 2 for i, mark in enumerate((*family.special, *family.plain))}
    named = {count + place: mark for mark, place in marks.items()}
    decoder = {str(place): {"content": mark, "special": mark not in family.plain, **FLAGS} for place, mark in named.items()}
    config = {**CONFIG, "added_tokens_decoder": decoder, "chat_template": family.template, **changes}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "tokenization_kimi.py").write_text(CODE)
    special = {named.get(place, f"<|reserved_token_{place}|>"): place for place in range(count, count + RESERVED)}
    return tiktoken.Encoding(
        "kimi", pat_str="|".join(PIECES), mergeable_ranks={token: rank for rank, token in enumerate(tokens)}, special_tokens=special
    )
