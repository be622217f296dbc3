"""Turns public-domain text into the bundled model: `python -m npucompile.tools.train_tiny --work DIR`; see docs/bundled-model.md."""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ..graphs import tree
from ..graphs.errors import SpecError
from ..graphs.types import Tree
from ..models import qwen3_5
from . import tiny_export, tiny_model
from .corpus import parse_chapters, read_bible, split_chapters
from .muon import Optimiser, Rates
from .tiny_draft import draft_losses, self_texts
from .tiny_tokenizer import EOS, TokenStream, train_tokenizer

SEED = 20261120
DRAFT_WEIGHT = 0.3
BALANCE_WEIGHT = 0.01
CLIP = 1.0
WARMUP = 40


@dataclass(frozen=True)
class Plan:
    """How long, and on what, one phase trains.

    The step size rises over `WARMUP` steps, stays, and falls linearly to zero over the last `decay` steps; so a longer run
    shares its first steps with a shorter one.

    Attributes:
        steps: optimiser steps.
        decay: steps of the final descent.
        tokens: tokens a step.
        length: tokens a window, twice as long during the descent.
        draft_from: first step that trains the draft head too.
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
        """Tokens a window of a step."""
        return self.length if step < self.steps - self.decay else 2 * self.length


@dataclass(frozen=True)
class Data:
    """The text as tokens."""

    tokenizer: Tokenizer
    training: TokenStream
    held_out: TokenStream

    @property
    def eos_id(self) -> int:
        return int(self.tokenizer.token_to_id(EOS))

    def held_out_windows(self, length: int) -> torch.Tensor:
        """int64 [windows, length]: the held-out text cut into consecutive windows that share their last two tokens."""
        return self.held_out.ids.unfold(0, length, length - 2)


def load_data() -> Data:
    """Reads the text, learns the tokenizer on the training chapters, encodes both parts.

    Raises:
        CorpusError: the `bible` command is missing.
    """
    training, held_out = split_chapters(parse_chapters(read_bible()))
    tokenizer = train_tokenizer(chapter.text for chapter in training)
    return Data(tokenizer, TokenStream.of(tokenizer, training), TokenStream.of(tokenizer, held_out))


def gradients(
    pool: Executor, parts: int, windows: torch.Tensor, loss: Callable[[torch.Tensor], tuple[torch.Tensor, list[float]]], leaves: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[float]]:
    """Clipped gradients of the mean loss, and the mean of its reported terms.

    Each part of the batch runs forward and backward in a thread of its own with one-threaded operators: on a shared machine
    this waits for stragglers once a step instead of once an operator.
    """

    def one(part: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], list[float]]:
        total, terms = loss(part)
        return torch.autograd.grad(total, leaves, materialize_grads=True), terms

    results = list(pool.map(one, windows.chunk(parts)))
    mean = [torch.stack(grads).mean(0) for grads in zip(*(grads for grads, _ in results), strict=True)]
    norm = torch.stack([grad.norm() for grad in mean]).norm()
    scale = (CLIP / (norm + 1e-6)).clamp(max=1.0)
    terms = [sum(values) / len(values) for values in zip(*(terms for _, terms in results), strict=True)]
    return [grad * scale for grad in mean], [*terms, float(norm)]


class Journal:
    """The loss curve of a phase as a CSV file that survives resumption."""

    def __init__(self, path: Path, columns: tuple[str, ...], from_step: int) -> None:
        self.path = path
        kept: list[list[str]] = []
        if path.exists() and from_step:
            with path.open(newline="") as file:
                kept = [row for row in list(csv.reader(file))[1:] if int(row[0]) <= from_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *kept])

    def add(self, step: int, tokens: int, *values: float | None) -> None:
        """Appends one row; None is an empty field."""
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([step, tokens, *("" if v is None else f"{v:.4f}" for v in values)])


class Trainer:
    """One run: parameters, data and a work directory with checkpoints."""

    def __init__(self, work: Path, curves: Path, threads: int) -> None:
        torch.set_num_threads(1)
        self.work, self.curves, self.threads = work, curves, threads
        work.mkdir(parents=True, exist_ok=True)
        self.data = load_data()
        self.config = tiny_model.hf_config(self.data.eos_id)
        self.cfg = qwen3_5.Config.from_hf(self.config)
        self.params: Tree = tiny_model.initial_params(self.cfg, SEED)
        self.pool = ThreadPoolExecutor(threads)

    def close(self) -> None:
        """Ends the worker threads."""
        self.pool.shutdown()

    def leaves(self) -> list[torch.Tensor]:
        return [leaf for _, leaf in tree.flatten(self.params)]

    def load(self, phase: str) -> dict[str, Any] | None:
        """Restores the parameters of a phase's checkpoint, if there is one, and returns it."""
        path = self.work / f"{phase}.pt"
        if not path.exists():
            return None
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        for leaf, value in zip(self.leaves(), saved["params"], strict=True):
            leaf.data.copy_(value)
        return saved

    def save(self, phase: str, step: int, optimiser: Optimiser) -> None:
        """Writes a phase's checkpoint, whole or not at all."""
        path = self.work / f"{phase}.pt"
        torch.save({"step": step, "params": [leaf.detach() for leaf in self.leaves()], "optimiser": optimiser.state()}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def train(self, plan: Plan, save_every_s: float = 120.0) -> None:
        """Main phase: all parameters, next token and draft head together."""
        optimiser = Optimiser(self.params, Rates())
        saved = self.load("main")
        first = 0
        if saved:
            first = saved["step"]
            optimiser.load(saved["optimiser"])
        journal = Journal(self.curves / "qwen3.5-tiny-loss.csv", ("step", "tokens", "loss", "draft_loss", "val_loss"), first)
        leaves = [leaf.requires_grad_() for leaf in self.leaves()]
        began = last_save = time.monotonic()
        for step in range(first, plan.steps):
            length, with_draft = plan.window(step), step >= plan.draft_from
            windows = self.data.training.batch(plan.tokens // length, length + 2, torch.Generator().manual_seed(SEED + step))

            def loss(part: torch.Tensor, with_draft: bool = with_draft) -> tuple[torch.Tensor, list[float]]:
                losses = tiny_model.joint_losses(self.cfg, self.params, part, with_draft)
                total = losses.main + DRAFT_WEIGHT * losses.draft + BALANCE_WEIGHT * losses.balance
                return total, [float(losses.main), float(losses.draft), float(losses.balance)]

            grads, (main, draft, balance, norm) = gradients(self.pool, self.threads, windows, loss, leaves)
            optimiser.update(grads, plan.factor(step), self.pool)
            done, pace = step + 1, (time.monotonic() - began) / (step + 1 - first)
            last = done == plan.steps
            if done % 10 == 0 or last:
                val = self.validate(None if last else 4096)[0] if done % 100 == 0 or last else None
                journal.add(done, done * plan.tokens, main, draft if with_draft else None, val)
                print(
                    f"main {done}/{plan.steps} loss {main:.3f} draft {draft:.3f} balance {balance:.3f} norm {norm:.2f} "
                    f"{'' if val is None else f'val {val:.4f} '}{pace:.2f} s/step, {pace * (plan.steps - done) / 60:.0f} min left",
                    flush=True,
                )
            if last or time.monotonic() - last_save > save_every_s:
                self.save("main", done, optimiser)
                last_save = time.monotonic()
        for leaf in leaves:
            leaf.requires_grad_(False)

    @torch.no_grad()
    def validate(self, tokens: int | None) -> tuple[float, float]:
        """Mean (next token, draft) losses over the held-out text, or over about `tokens` of it."""
        windows = self.data.held_out_windows(258)
        if tokens:
            windows = windows[:: max(1, len(windows) * 256 // tokens)]
        flags = [leaf.requires_grad for leaf in self.leaves()]
        parts = list(self.pool.map(self._validate_part, windows.split(8)))
        assert flags == [leaf.requires_grad for leaf in self.leaves()]
        total = sum(size for size, _, _ in parts)
        return sum(size * main for size, main, _ in parts) / total, sum(size * draft for size, _, draft in parts) / total

    @torch.no_grad()
    def _validate_part(self, part: torch.Tensor) -> tuple[int, float, float]:
        losses = tiny_model.joint_losses(self.cfg, self.params, part, True)
        return len(part), float(losses.main), float(losses.draft)


