"""Golden tokens: what transformers answers to prompts, greedily, with the log probabilities of the most likely tokens at each place.

A file is JSON, 40 KB for 8 prompts of 32 tokens: `format`, `vocab_size`, `made_by` (model, versions) and `prompts`, each with `prompt` and
`tokens` as ids, and `top`, for each of the tokens the most likely ones as [id, natural logarithm of the probability], the first first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...graphs.errors import SpecError

FORMAT = "npucompile.golden/1"
TEXTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    "人工智能的发展历史可以追溯到",
    "Question: A train travels 60 km in 40 minutes. What is its speed in km/h?\nAnswer:",
    '{"name": "Ada", "born": 1815, "known_for": ',
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was upon",
)
"""Prompts of a checkpoint with a tokenizer."""
LENGTHS = (1, 5, 17, 3, 30, 8, 12, 23)
"""Of random prompts, for one without."""

Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class GoldenPrompt:
    """One prompt.

    Attributes:
        prompt, tokens: ids.
        top: for each token (id, log probability) of the most likely ones, the most likely first.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top: tuple[Top, ...]


@dataclass(frozen=True)
class Golden:
    """What a file holds.

    Attributes:
        made_by: names of model, dtype and versions.
    """

    vocab_size: int
    made_by: Mapping[str, str]
    prompts: tuple[GoldenPrompt, ...]


def write(golden: Golden, path: Path) -> None:
    """Writes a file, a line a prompt."""
    head = json.dumps({"format": FORMAT, "vocab_size": golden.vocab_size, "made_by": dict(golden.made_by)})[:-1]
    prompts = ",\n ".join(json.dumps(asdict(prompt)) for prompt in golden.prompts)
    path.write_text(f'{head}, "prompts": [\n {prompts}\n]}}\n', encoding="utf-8")


def read(path: Path) -> Golden:
    """Reads a file.

    Raises:
        SpecError: it is none.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise SpecError(f"{path} is of format {fields['format']!r}; legal is {FORMAT}")
        prompts = tuple(_prompt(row) for row in fields["prompts"])
        return Golden(int(fields["vocab_size"]), fields["made_by"], prompts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{path} holds no golden tokens, which `npucompile golden` writes: {error!r}") from None


def _prompt(row: Mapping[str, Any]) -> GoldenPrompt:
    top = tuple(tuple((int(token), float(logprob)) for token, logprob in place) for place in row["top"])
    made = GoldenPrompt(tuple(row["prompt"]), tuple(row["tokens"]), top)
    if not made.prompt or len(made.top) != len(made.tokens) or not all(made.top):
        raise ValueError(f"{len(made.prompt)} ids of a prompt and {len(made.top)} places of {len(made.tokens)} tokens")
    return made


def prompts_of(encode: Callable[[str], Sequence[int]] | None, vocab_size: int) -> Iterator[tuple[int, ...]]:
    """The prompts: `TEXTS`, or random ids.

    Args:
        encode: text -> ids; None where there is no tokenizer.
    """
    if encode is not None:
        yield from (tuple(encode(text)) for text in TEXTS)
        return
    generator = torch.Generator().manual_seed(0)
    for length in LENGTHS:
        yield tuple(torch.randint(vocab_size, (length,), generator=generator).tolist())


def recorded(model: Any, prompts: Sequence[Sequence[int]], tokens: int, top: int) -> tuple[GoldenPrompt, ...]:
    """What a model of transformers answers, one prompt at a time and without padding.

    Args:
        model: a causal language model in eval mode.
        tokens: of each answer, whatever ends a text for it.
        top: how many of the most likely tokens are kept at each place.
    """
    # Neither sampling nor penalties nor ends of texts, whatever the checkpoint recommends.
    model.generation_config = type(model.generation_config)()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            answer = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        places = [torch.log_softmax(logits[0].float(), dim=-1).topk(min(top, logits.shape[-1])) for logits in answer.logits]
        best = tuple(tuple(zip(place.indices.tolist(), (round(v, 4) for v in place.values.tolist()), strict=True)) for place in places)
        answers.append(GoldenPrompt(tuple(prompt), tuple(answer.sequences[0, len(prompt) :].tolist()), best))
    return tuple(answers)
