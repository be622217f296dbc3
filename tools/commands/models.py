"""`npucompile models`: lists the presets."""

from __future__ import annotations

import click
import torch

from ...graphs import tree
from ...models import registry


@click.command("models")
def command() -> None:
    """List the model presets. Every MODEL argument may also be the path of a Hugging Face checkpoint directory."""
    for name in registry.presets():
        source = registry.find(name)
        sizes = [param.aval.shape for _, param in tree.flatten(source.model.params(torch.bfloat16))]
        count = sum(torch.Size(shape).numel() for shape in sizes)
        weights = "bundled" if source.checkpoint_dir else "sizes only; build a checkpoint directory to serve it"
        click.echo(f"{name:<16} {count / 1e9:>8.3f} B parameters   {weights}")
