"""What a journal says of the run that it records, and the engine that repeats it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact
from ...runtime.engine import Engine
from ...runtime.executor import Executor
from ...runtime.scheduler.kv_cache_manager import PrefixCacheSettings

POLICY = ("run_ahead", "prefill_burst", "measured", "itl_target_ms", "fixed_tokens")


def facts_of(artifact: Artifact, engine: Engine) -> dict[str, Any]:
    """What a journal says of the run that it records."""
    return {
        "npucompile": __version__,
        "torch": str(torch.__version__),
        "artifact": artifact.digest,
        "path": str(artifact.path.resolve()),
        "threads": torch.get_num_threads(),
        "run_ahead": engine.stepper.run_ahead,
        "prefill_burst": engine.stepper.policy.prefill_burst,
        "measured": engine.stepper.policy.measured,
        "itl_target_ms": engine.stepper.policy.itl_target_ms,
        "fixed_tokens": engine.stepper.policy.fixed_tokens,
        "prefix_cache": asdict(engine.stepper.prefix_cache) if engine.stepper.prefix_cache else None,
        "backends": dict(engine.executor.backends),
    }


def check(file: Path, facts: Mapping[str, Any], artifact: Artifact, any_artifact: bool) -> None:
    """Refuses to repeat a run on another artifact, unless that is wanted.

    Raises:
        SpecError: naming both.
    """
    if facts["artifact"] != artifact.digest and not any_artifact:
        raise SpecError(
            f"{file} was recorded on artifact {facts['artifact']}, and {artifact.path} is {artifact.digest}; legal is the same one, "
            "or --any-artifact to compare them"
        )


def engine_of(file: Path, facts: Mapping[str, Any], executor: Executor) -> Engine:
    """An engine that decides as the recorded one did.

    Raises:
        SpecError: the recorded one ran further ahead than the executor can.
    """
    if facts["run_ahead"] > executor.run_ahead:
        raise SpecError(f"{file} was recorded with run_ahead {facts['run_ahead']}; legal here is up to {executor.run_ahead}")
    prefix_cache = PrefixCacheSettings(**facts["prefix_cache"]) if facts["prefix_cache"] else None
    return Engine(executor, refresh_every_s=None, prefix_cache=prefix_cache, **{name: facts[name] for name in POLICY})
