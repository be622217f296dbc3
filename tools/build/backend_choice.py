"""Which backend compiles a build."""

from __future__ import annotations

from ...graphs.errors import SpecError
from ...models import registry
from .choices import NPU_BACKENDS
from .instance import Instance


def choose_backend(requested: str | None, source: registry.ModelSource, instance: Instance) -> str:
    """Name of the backend; several ranks on this machine run uncompiled.

    Args:
        requested: by `--backend`; None takes the target's.

    Raises:
        SpecError: it makes nothing that the target runs, or not of this model on this mesh.
    """
    target, mesh = instance.target, instance.mesh
    chosen = requested or (target.backend if not target.local or mesh.size == 1 else "eager")
    if chosen not in target.backends:
        if chosen in NPU_BACKENDS:
            raise SpecError(f"--backend {chosen} is for NPUs; name a --deployment, or a --target and a --mesh")
        raise SpecError(f"--backend {chosen} makes nothing that {target.name} runs; legal are {', '.join(target.backends)}")
    if target.local and source.checkpoint_dir is None and chosen != "null":
        raise SpecError(
            f"{source.name} is a set of sizes without weights, and --backend {requested or target.backend} runs them; "
            "legal here is --backend null (graphs, costs and memory only), a path to a checkpoint directory, or a build for NPUs "
            "(--target ascend-a3 --mesh tp=2, or a --deployment)"
        )
    if mesh.size > 1 and chosen == "inductor":
        raise SpecError(f"--backend inductor with mesh {mesh}: ranks on this machine run uncompiled; legal are eager and null")
    return chosen
