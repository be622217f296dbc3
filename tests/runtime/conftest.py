"""One model for tests of what restricts and changes what requests sample: its executors, and transformers' model of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.constrained import BITMASKS
from support.once import made_once

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.tools.notation import PrefillSize


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """No log of the failures that a test orders."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


NAMES = ("drafts", "plain", "free", "drafts scored", "plain scored")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "model", lambda to: tiny.write_checkpoint(to / "model", seed=7, agreeing=True)) / "model"


@pytest.fixture(scope="session")
def executors(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[CpuExecutor]:
    """One of graphs that draft, one of graphs that do not, and one of graphs without bitmasks and adjustments; and the first two with score
    buckets."""

    def build(home: Path) -> None:
        for name in NAMES:
            drafts, most = 3 * ("drafts" in name), BITMASKS * (name != "free")
            sizes = {"buckets": (1, 4), "prefill": (32, PrefillSize(32, 4)), "max_model_len": 128}
            sizes |= {"score": (32, PrefillSize(8, 3))} if "scored" in name else {}
            inputs = {"num_speculative_tokens": drafts, "structured_outputs": most, "logit_adjustments": most}
            tiny.built(tiny.planned(model, **sizes, **inputs), home / name, fresh=True)

    home = made_once(tmp_path_factory, "executors", build)
    return [CpuExecutor(Artifact.open(home / name)) for name in NAMES]


@pytest.fixture(scope="session")
def theirs(model: Path) -> Any:
    from transformers import AutoModelForCausalLM  # after it has been told that there is no torch_npu

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
