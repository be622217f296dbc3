"""`npucompile models`: lists the presets, and writes a small model with the layers of a large one."""

from __future__ import annotations

from pathlib import Path

import click
import torch

from ...graphs import tree
from ...graphs.errors import SpecError
from ...models import registry
from ...models.family_file import FamilyFile
from ...models.presets import DRAFT_PRESETS
from ..builder.reduce import write_reduced
from .family_option import family_option


@click.command("models")
@click.argument("model", required=False)
@click.option("--reduce", "directory", type=click.Path(path_type=Path), help="Write MODEL, narrow and with random weights, here.")
@family_option
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random weights.")
def command(model: str | None, directory: Path | None, family: str | None, seed: int) -> None:
    """List the model presets. Every MODEL argument may also be the path of a Hugging Face checkpoint directory.

    With --reduce, a checkpoint is written that has MODEL's layers, heads and draft head, but is narrow: it builds for the same meshes
    and runs on any machine, to rehearse a deployment. With --family alone, a family's file is checked.

    Example: npucompile models qwen3.5-397b --reduce small-397b
    """
    own = FamilyFile.read(family) if family else None
    if own and model is None and directory is None:
        record = registry.own_family(own)
        click.echo(f"{own.name}: family {record.name}, for model_type {', '.join(record.model_types)}")
        return
    if (model is None) != (directory is None):
        raise SpecError("MODEL and --reduce DIRECTORY belong together; legal is both, or neither to list the presets")
    if model is not None and directory is not None:
        click.echo(write_reduced(model, directory, seed, own))
        return
    for name in registry.presets():
        source = registry.find(name)
        sizes = [param.aval.shape for _, param in tree.flatten(source.model.params(torch.bfloat16))]
        count = sum(torch.Size(shape).numel() for shape in sizes)
        weights = "bundled" if source.checkpoint_dir else "sizes only; build a checkpoint directory to serve it"
        click.echo(f"{name:<16} {count / 1e9:>8.3f} B parameters   {weights}")
    for name, preset in DRAFT_PRESETS.items():
        click.echo(f"{name:<28} draft model of {preset['target']}, for --draft-model; sizes only")
