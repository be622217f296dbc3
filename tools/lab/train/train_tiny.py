"""Trains the bundled model: `python -m npucompile.tools.lab.train.train_tiny --out DIR --curves DIR`; see docs/bundled-model.md."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ....graphs import tree
from ....graphs.types import Tree
from ....models import qwen3_5
from . import tiny_export, tiny_model
from .corpus import parse_chapters, read_bible, split_chapters
from .optimiser import Optimiser, Rates
from .tiny_draft import DEPTH, acceptance, agreement, continue_texts, draft_losses, random_bases, rounded
from .tiny_tokenizer import TokenStream, eos_id, train_tokenizer

SEED = 20261120
DRAFT_WEIGHT = 0.3
BALANCE_WEIGHT = 0.01
CLIP = 1.0
WARMUP = 60


@dataclass(frozen=True)
class TrainingPhase:
    """Length and batch size of one training phase.

    The step size rises over `WARMUP` steps, stays constant, and falls linearly to zero over the last `decay` steps, so a longer run
    shares its first steps with a shorter one.

    Attributes:
        steps: optimiser steps.
        decay: last steps, with a falling step size.
        tokens: tokens per step.
        length: tokens per window; twice as many in the last `decay` steps.
        draft_from: first step that also trains the draft head.
    """

    steps: int
    decay: int
    tokens: int
    length: int
    draft_from: int = 0

    def factor(self, step: int) -> float:
        """Step-size factor of a step counted from 0."""
        return min(1.0, (step + 1) / WARMUP, (self.steps - step) / self.decay)

    def window(self, step: int) -> int:
        """Tokens per window in a step."""
        return self.length if step < self.steps - self.decay else 2 * self.length


MAIN = TrainingPhase(steps=2000, decay=700, tokens=2048, length=256, draft_from=400)
DRAFT = TrainingPhase(steps=300, decay=200, tokens=4096, length=256)
PROMPTS = ("In the beginning", "And the LORD said unto Moses,", "Blessed are", "The king of Israel")


@dataclass(frozen=True)
class Data:
    """The tokenizer and the tokenized text."""

    tokenizer: Tokenizer
    training: TokenStream
    held_out: TokenStream

    def held_out_windows(self, length: int) -> torch.Tensor:
        """int64 [windows, length]: the held-out text cut into consecutive windows that share their last two tokens."""
        return self.held_out.ids.unfold(0, length, length - 2)


def load_data() -> Data:
    """Reads the text, trains the tokenizer on the training chapters, and tokenizes both parts.

    Raises:
        CorpusError: the `bible` command is missing.
    """
    training, held_out = split_chapters(parse_chapters(read_bible()))
    tokenizer = train_tokenizer(chapter.text for chapter in training)
    return Data(tokenizer, TokenStream.of(tokenizer, training), TokenStream.of(tokenizer, held_out))


def gradients(
    pool: Executor,
    parts: int,
    windows: torch.Tensor,
    loss: Callable[[torch.Tensor], tuple[torch.Tensor, list[float]]],
    leaves: list[torch.Tensor],
) -> tuple[list[torch.Tensor], list[float]]:
    """Clipped gradients of the mean loss, and the means of its terms, followed by the norm of the gradients.

    Each part of the batch runs forward and backward in a thread of its own with single-threaded operators: threads then wait for each
    other once per step instead of once per operator.
    """

    def part_gradients(part: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], list[float]]:
        total, terms = loss(part)
        return torch.autograd.grad(total, leaves, materialize_grads=True), terms

    results = list(pool.map(part_gradients, windows.chunk(parts)))
    mean = [torch.stack(grads).mean(0) for grads in zip(*(grads for grads, _ in results), strict=True)]
    norm = torch.stack([grad.norm() for grad in mean]).norm()
    scale = (CLIP / (norm + 1e-6)).clamp(max=1.0)
    terms = [sum(values) / len(values) for values in zip(*(terms for _, terms in results), strict=True)]
    return [grad * scale for grad in mean], [*terms, float(norm)]


class LossCurve:
    """The loss curve of a phase as a CSV file."""

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(",".join(columns) + "\n", encoding="utf-8")

    def add(self, step: int, tokens: int, *values: float | None) -> None:
        """Appends one row; None is an empty field."""
        row = (str(step), str(tokens), *("" if value is None else f"{value:.4f}" for value in values))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(",".join(row) + "\n")


class Trainer:
    """One training run: parameters, data and a directory for the loss curves."""

    def __init__(self, curves: Path, threads: int) -> None:
        torch.set_num_threads(1)
        self.curves, self.threads = curves, threads
        self.data = load_data()
        self.config = tiny_model.hf_config(eos_id(self.data.tokenizer))
        self.cfg = qwen3_5.read_config(self.config)
        self.params: Tree = tiny_model.initial_params(self.cfg, SEED)
        self.pool = ThreadPoolExecutor(threads)

    def close(self) -> None:
        """Ends the worker threads."""
        self.pool.shutdown()

    def leaves(self) -> list[torch.Tensor]:
        return [leaf for _, leaf in tree.flatten(self.params)]

    def train(self, phase: TrainingPhase) -> None:
        """Main phase: trains all parameters on the losses of the next token and of the draft head."""
        optimiser = Optimiser(self.params, Rates())
        curve = LossCurve(self.curves / "qwen3.5-tiny-loss.csv", ("step", "tokens", "loss", "draft_loss", "val_loss"))
        leaves = [leaf.requires_grad_() for leaf in self.leaves()]
        began = time.monotonic()
        for step in range(phase.steps):
            length, with_draft = phase.window(step), step >= phase.draft_from
            windows = self.data.training.batch(phase.tokens // length, length + 2, torch.Generator().manual_seed(SEED + step))

            def loss(part: torch.Tensor, with_draft: bool = with_draft) -> tuple[torch.Tensor, list[float]]:
                losses = tiny_model.joint_losses(self.cfg, self.params, part, with_draft)
                total = losses.main + DRAFT_WEIGHT * losses.draft + BALANCE_WEIGHT * losses.balance
                return total, [term.item() for term in (losses.main, losses.draft, losses.balance)]

            grads, (main, draft, balance, norm) = gradients(self.pool, self.threads, windows, loss, leaves)
            optimiser.update(grads, phase.factor(step), self.pool)
            done, pace = step + 1, (time.monotonic() - began) / (step + 1)
            last = done == phase.steps
            if done % 10 == 0 or last:
                val = self.validate(None if last else 4096)[0] if done % 100 == 0 or last else None
                curve.add(done, done * phase.tokens, main, draft if with_draft else None, val)
                print(
                    f"main {done}/{phase.steps} loss {main:.3f} draft {draft:.3f} balance {balance:.3f} norm {norm:.2f} "
                    f"{'' if val is None else f'val {val:.4f} '}{pace:.2f} s/step, {pace * (phase.steps - done) / 60:.0f} min left",
                    flush=True,
                )
        for leaf in leaves:
            leaf.requires_grad_(False)

    @torch.no_grad()
    def validate(self, tokens: int | None) -> tuple[float, float]:
        """Mean losses (next token, draft) over the held-out text, or over about `tokens` tokens of it."""
        windows = self.data.held_out_windows(258)
        if tokens:
            windows = windows[:: max(1, len(windows) * 256 // tokens)]
        parts = list(self.pool.map(self._validate_part, windows.split(8)))
        total = sum(size for size, _, _ in parts)
        return sum(size * main for size, main, _ in parts) / total, sum(size * draft for size, _, draft in parts) / total

    @torch.no_grad()
    def _validate_part(self, part: torch.Tensor) -> tuple[int, float, float]:
        losses = tiny_model.joint_losses(self.cfg, self.params, part, True)
        return len(part), float(losses.main), float(losses.draft)

    def own_texts(self, source: TokenStream, rows: int, prompt: int, length: int, temperature: float, seed: int) -> torch.Tensor:
        """int64 [rows, length]: the model's continuations of the first `prompt` tokens of random verses; one seed gives one result."""
        generator = torch.Generator().manual_seed(seed)
        prompts = source.batch(rows, prompt, generator)
        draws = [torch.Generator().manual_seed(seed + 1 + i) for i in range(self.threads)]

        def continuations(part: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            return continue_texts(self.cfg, self.params, part, length - prompt, temperature, generator)

        return torch.cat(list(self.pool.map(continuations, prompts.chunk(self.threads), draws)))

    def train_draft(self, phase: TrainingPhase, texts: torch.Tensor, bases: int = 24) -> None:
        """Draft phase: trains the draft head to predict the frozen model's output, also from the head's own hidden states.

        Args:
            texts: int64 [rows, Q+1], texts by the model; half of each batch is drawn from them, the other half from the corpus.
            bases: positions per text from which all drafts are trained, not only the first.
        """
        optimiser = Optimiser(self.params, Rates(matrix=0.01, other=2e-3), only="mtp.")
        names = ("step", "tokens", *(f"draft_{j + 1}_loss" for j in range(DEPTH)), "mean_accepted_tokens")
        curve = LossCurve(self.curves / "qwen3.5-tiny-draft-loss.csv", names)
        leaves = [leaf.requires_grad_() for leaf in optimiser.leaves.values()]
        rows, length = phase.tokens // phase.length, phase.length
        trial = self.own_texts(self.data.held_out, 16, 32, 161, 0.0, SEED)
        began = time.monotonic()
        for step in range(phase.steps):
            generator = torch.Generator().manual_seed(SEED + step)
            own = texts[torch.randint(len(texts), (rows // 2,), generator=generator)][:, : length + 1]
            windows = torch.cat((own, self.data.training.batch(rows - rows // 2, length + 1, generator)))
            batch = torch.cat((windows, random_bases(rows, length, bases, generator)), 1)

            def loss(part: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
                losses = draft_losses(self.cfg, self.params, part[:, : length + 1], part[:, length + 1 :])
                return torch.stack(losses).mean(), [value.item() for value in losses]

            grads, (*values, norm) = gradients(self.pool, self.threads, batch, loss, leaves)
            optimiser.update(grads, phase.factor(step), self.pool)
            done, pace = step + 1, (time.monotonic() - began) / (step + 1)
            last = done == phase.steps
            if done % 10 == 0 or last:
                accepted = acceptance(self.cfg, self.params, trial, 32).mean_tokens if done % 50 == 0 or last else None
                curve.add(done, done * phase.tokens, *values, accepted)
                print(
                    f"draft {done}/{phase.steps} losses {' '.join(f'{v:.3f}' for v in values)} norm {norm:.2f} "
                    f"{'' if accepted is None else f'accepted {accepted:.3f} '}{pace:.2f} s/step, "
                    f"{pace * (phase.steps - done) / 60:.0f} min left",
                    flush=True,
                )
        for leaf in leaves:
            leaf.requires_grad_(False)

    def report(self) -> None:
        """Prints the figures of docs/bundled-model.md, for the parameters rounded as in the exported file."""
        self.params = rounded(self.params)
        main, draft = self.validate(None)
        print(f"held-out text: next token {main:.4f} nats, draft {draft:.4f} nats a token")
        texts = self.own_texts(self.data.held_out, 48, 32, 193, 0.0, SEED + 7)
        accepted = acceptance(self.cfg, self.params, texts, 32)
        rates = ", ".join(f"{rate:.3f}" for rate in accepted.rates)
        print(f"greedy, {DEPTH} drafts: {accepted.mean_tokens:.3f} tokens a step over {accepted.steps} steps; first 1.. accepted: {rates}")
        agreed = agreement(self.cfg, self.params, self.data.held_out_windows(257)[:32])
        print(f"on the held-out text itself the first draft is the model's best token at {agreed:.3f} of positions")
        for prompt in PROMPTS:
            ids = torch.tensor([self.data.tokenizer.encode(prompt).ids])
            for temperature in (0.0, 0.7):
                text = continue_texts(self.cfg, self.params, ids, 80, temperature, torch.Generator().manual_seed(SEED))
                print(f"[{temperature}] {self.data.tokenizer.decode(text[0].tolist(), skip_special_tokens=False)}\n")

    def export(self, directory: Path) -> None:
        """Writes the checkpoint directory."""
        tiny_export.export(self.cfg, self.config, self.params, self.data.tokenizer, directory)


def main() -> None:
    """Trains both phases, writes the checkpoint after each, and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--curves", type=Path, required=True, help="directory for the loss curves")
    parser.add_argument("--steps", type=int, default=MAIN.steps, help="steps of the main phase (default %(default)s)")
    parser.add_argument("--decay", type=int, default=MAIN.decay, help="its last steps, with a falling step size (default %(default)s)")
    parser.add_argument("--draft-steps", type=int, default=DRAFT.steps, help="steps of the draft phase (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="parts a batch is split into (default %(default)s)")
    options = parser.parse_args()
    trainer = Trainer(options.curves, options.threads)
    try:
        trainer.train(replace(MAIN, steps=options.steps, decay=options.decay))
        trainer.export(options.out)
        texts = torch.cat([trainer.own_texts(trainer.data.training, 256, 16, 257, t, SEED + i * 100) for i, t in enumerate((0.0, 0.7))])
        trainer.train_draft(replace(DRAFT, steps=options.draft_steps), texts)
        trainer.export(options.out)
        trainer.report()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
