"""The bundled model's tokens with the marks of a family, as its tokenizer has them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from support.family_templates import FAMILIES
from support.grammars import BUNDLED, Vocabulary
from tokenizers import AddedToken, Tokenizer


@dataclass(frozen=True)
class Marked(Vocabulary):
    """Its kind is the name of a family."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer, family = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), FAMILIES[self.kind]
        marks = [AddedToken(mark, special=True, normalized=False) for mark in family.special]
        tokenizer.add_tokens([*marks, *(AddedToken(mark, normalized=False) for mark in family.plain)])
        return tokenizer


marked = cache(Marked)
