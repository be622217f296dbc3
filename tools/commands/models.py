"""`npucompile models`: lists the presets, and writes a small model with the layers of a large one."""

from __future__ import annotations

from pathlib import Path

import click

from ...graphs.errors import SpecError
from ...models.presets import BUNDLED, DRAFT_PRESETS, PARAMETERS
from ..cli import Home
from .family_option import family_option


@click.command("models")
@click.argument("model", required=False)
@click.option("--reduce", "directory", type=click.Path(path_type=Path), help="Write MODEL, narrow and with random weights, here.")
@family_option
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random weights.")
@click.pass_obj
def command(home: Home, /, model: str | None, directory: Path | None, family: str | None, seed: int) -> None:
    """List the model presets. Every MODEL argument may also be a Hugging Face checkpoint directory, or ORG/NAME at a hub.

    With --reduce, a checkpoint is written that has MODEL's layers, heads and draft head, but is narrow: it builds for the same meshes
    and runs on any machine, to rehearse a deployment. With --family alone, a family's file is checked.

    Example: npucompile models qwen3.5-397b --reduce small-397b
    """
    if family is None and model is None and directory is None:
        _list()
        return
    # Imported late, so that a list need not load torch.
    from ...models import registry
    from ...models.family_file import FamilyFile
    from ..builder.reduce import write_reduced
    from ..hub import checkpoint_of
    from ..progress import Progress

    own = FamilyFile.read(family) if family else None
    if own and model is None and directory is None:
        record = registry.own_family(own)
        click.echo(f"{own.name}: family {record.name}, for model_type {', '.join(record.model_types)}")
        return
    if model is None or directory is None:
        raise SpecError("MODEL and --reduce DIRECTORY belong together; legal is both, or neither to list the presets")
    model = checkpoint_of(model, home.environment, Progress(), weights=False)
    click.echo(write_reduced(model, directory, seed, own))


def _list() -> None:
    width = max(map(len, (*PARAMETERS, *DRAFT_PRESETS)))
    for name, count in PARAMETERS.items():
        weights = "bundled" if name in BUNDLED else "sizes only; build a checkpoint directory to serve it"
        click.echo(f"{name:<{width}} {count / 1e9:>9.3f} B parameters   {weights}")
    for name, preset in DRAFT_PRESETS.items():
        click.echo(f"{name:<{width}}   draft model of {preset['target']}, for --draft-model; sizes only")
