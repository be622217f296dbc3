"""The bundled model's tokenizer with its grammars, and masks as sets of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import npucompile
from npucompile.server.grammar import GrammarCompiler

BUNDLED = Path(npucompile.__path__[0]) / "models" / "bundled" / "qwen3.5-tiny"
TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
EOS = json.loads((BUNDLED / "config.json").read_text())["eos_token_id"]
V = TOKENIZER.get_vocab_size() + 37
COMPILER = GrammarCompiler(TOKENIZER, [EOS])
WORDS = -(-V // 32)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def masks(constraint, output, drafts=()) -> list[set[int]]:
    bitmask = np.full((len(drafts) + 1, WORDS), -1, np.int32)
    constraint.fill(output, drafts, bitmask)
    bits = np.unpackbits(bitmask.view(np.uint8), axis=-1, bitorder="little")
    return [set(np.nonzero(row)[0].tolist()) for row in bits]
