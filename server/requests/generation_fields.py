"""The fields that say how prompts are completed: those that OpenAI's bodies, the websocket's among them, have under the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from ...runtime.request import Sampling
from .bodies import FailFast
from .bounds import (
    MAX_BAD_WORDS,
    MAX_COMPLETIONS,
    MAX_PRIORITY,
    MAX_SALT_CHARS,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
)
from .router_fields import RouterFields
from .structured_output import OutputFormat, of_extension

MAX_ID_DIGITS = 10
"""A number of thousands of digits would take long to read."""

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Fields of `Sampling` for which a checkpoint may have defaults."""

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Seed = Annotated[int, Field(ge=-1, le=MAX_SEED)]
Biases = tuple[tuple[int, float], ...]


def logit_bias(value: Any) -> Biases:
    """An object of token ids, which JSON has as strings, and what is added to their logits; by token id."""
    if not isinstance(value, dict) or not all(map(_is_token, value)) or not all(map(_is_number, value.values())):
        raise ValueError(f"an object with token ids as names, of at most {MAX_ID_DIGITS} digits, and numbers as values")
    return tuple(sorted((int(token), bias) for token, bias in value.items()))


def _is_token(token: Any) -> bool:
    decimal = isinstance(token, int) or (isinstance(token, str) and token.isascii() and token.isdecimal())
    return decimal and len(str(token)) <= MAX_ID_DIGITS


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


LogitBias = Annotated[Biases, PlainValidator(logit_bias)]


class GenerationFields(RouterFields):
    """How prompts are completed; see docs/api.md, and `runtime.request` for what changes sampling."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] = 1
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), FailFast()] = Field(default_factory=list)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = ()
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1), FailFast()] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS), FailFast()] = Field(default_factory=list)
    speculative_tokens: Annotated[int, Field(ge=0)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] = ""
    skip_reading_prefix_cache: bool = False
    structured_outputs: Annotated[OutputFormat | None, PlainValidator(of_extension)] = None
    priority: Priority = 0
    timeout_ms: Annotated[int, Field(ge=1)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end the output."""
        return stop_strings(self.stop)

    def sampling(self, defaults: Mapping[str, float]) -> Sampling:
        """How tokens are picked: as the body says, else by defaults.

        Raises:
            RequestError: a value is not legal.
        """
        allowed = None if self.allowed_token_ids is None else tuple(sorted(set(self.allowed_token_ids)))
        return Sampling(**chosen(self, defaults), seed=seed_of(self.seed), min_tokens=self.min_tokens, allowed_token_ids=allowed)


def seed_of(seed: int | None) -> int | None:
    """The seed of a field; -1 is none, as in vLLM."""
    return None if seed == -1 else seed


def stop_strings(stop: str | list[str]) -> tuple[str, ...]:
    """The strings of a field that may have one alone."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def chosen(body: Any, defaults: Mapping[str, float]) -> dict[str, Any]:
    """The fields of `Sampling` that SGLang's bodies have under these names too."""
    fields: dict[str, Any] = {**defaults, **{name: value for name in SAMPLED if (value := getattr(body, name)) is not None}}
    if fields.get("top_k") == -1:  # vLLM's and SGLang's "all"
        fields["top_k"] = 0
    return fields | {"logit_bias": body.logit_bias}
