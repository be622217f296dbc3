"""Text of a stream of tokens whose vocabulary is byte-level: what a token adds are bytes, whatever comes before it."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders

from .token_text import spelt_bytes


class TokenBytes(dict[int, bytes]):
    """Bytes of each token of a byte-level tokenizer, looked up once.

    As its library decodes (ByteLevel in tokenizers/src/pre_tokenizers/byte_level.rs): a token with a character that stands for no byte is
    its own UTF-8; an id that no token has, and a special token that is left out, are nothing.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        super().__init__()
        self._name_of = tokenizer.id_to_token
        special = {id_: token.special for id_, token in tokenizer.get_added_tokens_decoder().items()}
        self.update({id_: b"" for id_, skipped in special.items() if skipped and skip_special})

    def __missing__(self, token_id: int) -> bytes:
        name = self._name_of(token_id) or ""
        spelt = spelt_bytes(name)
        self[token_id] = data = name.encode() if spelt is None else spelt
        return data


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the text of tokens is the UTF-8 of their bytes, one after the other."""
    return isinstance(tokenizer.decoder, decoders.ByteLevel)


class ByteDetokenizer:
    """See `tokenizer.Detokenizer`: a lookup for each token, and no call of the tokenizer's library for each event of each stream."""

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        self._bytes_of = token_bytes.__getitem__
        self._rest = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that later tokens can no longer change."""
        data = self._rest + b"".join(map(self._bytes_of, token_ids))
        text, size = utf_8_decode(data, "replace", False)
        self._rest = data[size:]
        return text

    def flush(self) -> str:
        """The rest, at the end of the stream."""
        data, self._rest = self._rest, b""
        return data.decode(errors="replace")
