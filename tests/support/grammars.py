"""The bundled model's tokenizer with its grammars, and masks as sets of tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer

import npucompile
from npucompile.server.grammar.compiler import GrammarCompiler
from npucompile.server.parsers.call_formats import CALL_BEGIN, CALL_END, CALLS, DSML, SEP

BUNDLED = Path(npucompile.__path__[0]) / "models" / "bundled" / "qwen3.5-tiny"
EOS = json.loads((BUNDLED / "config.json").read_text())["eos_token_id"]
MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"),
    *(CALL_BEGIN, CALL_END, *CALLS, SEP, DSML),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>", "[TOOL_CALLS]", "[ARGS]"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|python_tag|>", "<|channel|>", "<|message|>", "<|call|>"),
)
"""Added tokens of Qwen's, DeepSeek's, GLM's, Kimi's, MiniMax', Mistral's, Llama's and gpt-oss' tokenizers."""

SPELT, TEXT, SPECIAL = "spelt", "text", "special"
"""Marks are no tokens at all; tokens that are not special, as in Qwen3's and DeepSeek-R1's tokenizers; special tokens."""


@dataclass(frozen=True)
class Vocabulary:
    """The bundled model's tokens, and behind them those of marks."""

    kind: str

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
        if self.kind != SPELT:
            tokenizer.add_tokens([AddedToken(mark, special=self.kind == SPECIAL, normalized=False) for mark in MARKS])
        return tokenizer

    @cached_property
    def size(self) -> int:
        """Of the model's logits, which are more than the tokens."""
        return self.tokenizer.get_vocab_size() + 37

    @cached_property
    def compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, [EOS])

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def masks(self, constraint, output, drafts=()) -> list[set[int]]:
        return masks_of(constraint, self.size, output, drafts)

    def follows(self, constraint, text: str) -> bool:
        """Whether a model may write a text in the tokens that are its own, every other one of them verified as a draft.

        Also that masks are the same behind output and behind drafts.
        """
        tokens, behind_drafts = self.ids(text), None
        for place in range(0, len(tokens) + 1, 2):
            found = self.masks(constraint, tokens[:place], tokens[place : place + 2])
            assert behind_drafts in (None, found[0])
            behind_drafts = found[2] if len(found) > 2 else None
            if not all(token in mask for token, mask in zip([*tokens, EOS][place:], found, strict=False)):
                return False
        return True


def masks_of(constraint, size: int, output, drafts=()) -> list[set[int]]:
    """The legal tokens after an output and each draft."""
    bitmask = np.full((len(drafts) + 1, -(-size // 32)), -1, np.int32)
    constraint.fill(output, drafts, bitmask)
    bits = np.unpackbits(bitmask.view(np.uint8), axis=-1, bitorder="little")
    return [set(np.nonzero(row)[0].tolist()) for row in bits]


vocabulary = cache(Vocabulary)
TOKENIZER, COMPILER, V = vocabulary(SPELT).tokenizer, vocabulary(SPELT).compiler, vocabulary(SPELT).size
ids, masks = vocabulary(SPELT).ids, vocabulary(SPELT).masks
