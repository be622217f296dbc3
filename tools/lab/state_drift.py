"""Drift of bfloat16 recurrent states against float32 ones: `python -m npucompile.tools.lab.state_drift`, printed as Markdown.

All else is float32, and both runs read the same tokens, drawn from what the float32 run gives: what differs is that one rounds its states
to bfloat16 after every token, as CANN's recurrent operator stores them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...graphs import ops, tree
from ...graphs.types import Limits
from ...models import checkpoint, registry

PLACES = (16, 64, 256, 1024, 4096)
DECAYS = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)
"""Log decays a token: a state keeps 1 / decay tokens, or all of them."""
_WIDTH = 128


@dataclass(frozen=True)
class Drift:
    """What a window of tokens showed.

    Attributes:
        tokens: generated at its end.
        agreement: share of its tokens whose likeliest successor is the same in both runs.
        logits: error of the logits, relative to their deviation.
        states: norm of the states' difference at its end, relative to their norm; largest of all layers.
    """

    tokens: int
    agreement: float
    logits: float
    states: float


def of_model(name: str, tokens: int, batch: int, seed: int = 0) -> Iterator[Drift]:
    """A model with weights, from one random token a row; one result a place of `PLACES` up to `tokens`."""
    source = registry.find(name)
    if source.checkpoint_dir is None:
        raise SystemExit(f"{name} has no weights; legal is a bundled model or a checkpoint directory")
    model, page = source.model, 256
    pages = -(-tokens // page)
    limits = Limits(page, 1 + batch * pages, 1 + batch, pages * page)
    params = checkpoint.load(checkpoint.open_checkpoint(source.checkpoint_dir), model.params(torch.float32))
    runs = [_Run(model, dtype, params, limits, batch) for dtype in (torch.float32, torch.bfloat16)]
    r = torch.Generator().manual_seed(seed)
    token = torch.randint(model.config.vocab_size, (batch, 1), generator=r, dtype=torch.int32)
    same, errors = [], []
    for place in range(tokens):
        exact, rounded = (run.step(token, place) for run in runs)
        same.append((exact.argmax(-1) == rounded.argmax(-1)).float().mean())
        errors.append((exact - rounded).square().mean().sqrt() / exact.std())
        token = torch.multinomial(exact.softmax(-1), 1, generator=r).int()
        if place + 1 in PLACES:
            states = max(_relative(b, a) for a, b in zip(*(run.states() for run in runs), strict=True))
            yield Drift(place + 1, float(torch.stack(same).mean()), float(torch.stack(errors).mean()), states)
            same, errors = [], []


class _Run:
    """One request a row, a token a step, in eager torch."""

    def __init__(self, model: Any, dtype: torch.dtype, params: Any, limits: Limits, batch: int) -> None:
        config = replace(model.config, variant=replace(model.config.variant, recurrent=dtype))
        self._model, self._params = replace(model, config=config), params
        avals = self._model.state(limits, torch.float32)
        self._state = tree.unflatten(avals, (torch.zeros(aval.shape, dtype=aval.dtype) for _, aval in tree.flatten(avals)))
        slots = torch.arange(1, batch + 1, dtype=torch.int32)
        table = torch.arange(1, limits.num_pages, dtype=torch.int32).view(batch, -1)
        self._inputs = {
            "page_table": table,
            "query_lens": torch.ones_like(slots),
            "state_slots_in": slots,
            "state_slots_out": slots[:, None],
        }

    def step(self, token: torch.Tensor, place: int) -> torch.Tensor:
        """Logits [B, V] after the tokens [B, 1]."""
        inputs = {**self._inputs, "tokens": token, "num_computed_tokens": torch.full((len(token),), place, dtype=torch.int32)}
        hidden, self._state, _ = self._model.family.forward(self._model.config, self._params, self._state, inputs)
        logits: torch.Tensor = self._model.family.head(self._model.config, self._params, hidden)
        return logits

    def states(self) -> list[torch.Tensor]:
        return [pool["delta"][1:].float() for pool in self._state["layers"] if "delta" in pool]


def of_layer(decay: float, tokens: int, seed: int = 0) -> Iterator[tuple[int, float, float]]:
    """Heads of a full-size model's width with random unit keys: tokens, relative errors of the state and of the last output."""
    r = torch.Generator().manual_seed(seed)
    heads = 4
    pools = [torch.zeros(2, heads, _WIDTH, _WIDTH, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    slot, query_lens = torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    g = torch.full((1, 1, heads), -decay)
    for place in range(tokens):
        q, k = (torch.nn.functional.normalize(torch.randn(1, 1, heads, _WIDTH, generator=r), dim=-1) for _ in "qk")
        v, beta = torch.randn(1, 1, heads, _WIDTH, generator=r), torch.rand(1, 1, heads, generator=r)
        outs = []
        for i, pool in enumerate(pools):
            out, pools[i] = ops.gated_delta(q, k, v, g, beta, pool, slot, slot[:, None], torch.full((1,), place), query_lens)
            outs.append(out)
        if place + 1 in PLACES:
            yield place + 1, _relative(pools[1].float(), pools[0]), _relative(outs[1], outs[0])


def _relative(actual: torch.Tensor, want: torch.Tensor) -> float:
    return float((actual - want).norm() / want.norm())


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3.5-tiny")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    with torch.inference_mode():
        print("| tokens | greedy tokens that agree | error of logits | error of states |\n| ---: | ---: | ---: | ---: |")
        for drift in of_model(options.model, options.tokens, options.batch):
            print(f"| {drift.tokens:,} | {drift.agreement:.2%} | {drift.logits:.2%} | {drift.states:.2%} |", flush=True)
        print("\n| log decay a token | tokens | error of state | error of output |\n| ---: | ---: | ---: | ---: |")
        for decay in DECAYS:
            for tokens, state, out in of_layer(decay, options.tokens):
                if tokens in PLACES[-3:]:
                    print(f"| {decay:g} | {tokens:,} | {state:.2%} | {out:.2%} |", flush=True)


if __name__ == "__main__":
    main()
