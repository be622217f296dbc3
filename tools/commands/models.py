"""Turns the presets into a table."""

from __future__ import annotations

import click
import torch

from ...graphs import tree
from ...models import registry


@click.command("models")
def command() -> None:
    """List the models that can be named; a path to a Hugging Face checkpoint directory may stand for any of them."""
    for name in registry.presets():
        found = registry.find(name)
        sizes = [param.aval.shape for _, param in tree.flatten(found.model.params(torch.bfloat16))]
        count = sum(torch.Size(shape).numel() for shape in sizes)
        weights = "bundled" if found.checkpoint_dir else "sizes only; build a checkpoint directory to serve it"
        click.echo(f"{name:<16} {count / 1e9:>8.3f} B parameters   {weights}")
