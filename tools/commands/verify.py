"""Turns `npucompile verify` into a repeated proof."""

from __future__ import annotations

import json
import time

import click

from ...graphs.errors import SpecError
from ...graphs.types import Mesh
from ...lowering.artifact.artifact import Artifact
from ..cli import Home
from ..locate import artifact_path
from ..progress import Progress
from ..verify.executables import verify
from ..verify.mesh import verify_mesh
from ..verify.npu import DEFAULT_STEPS, describe, is_for_device, verify_device


@click.command("verify")
@click.argument("artifact", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
@click.option("--steps", type=click.IntRange(1, 64), help=f"For NPUs: decode steps of the small model.  [default: {DEFAULT_STEPS}]")
@click.option("--seed", type=click.IntRange(0), help="For NPUs: of the small model's weights, prompts and drafts.  [default: 0]")
@click.pass_obj
def command(home: Home, artifact: str | None, as_json: bool, steps: int | None, seed: int | None) -> None:
    """Repeat the build's proof on ARTIFACT (a directory or a built model's name; the newest when none is given).

    Checks every file's digest. For this machine: compares each bucket's executable with the eager reference: full batches,
    padded ones, and row by row, with all that a live row must not read poisoned with NaN; ranks of a mesh are run together in one
    process and compared with one device. For NPUs: checks each GE graph as it is shipped, then runs a small model in its image, with
    the same layers, mesh, quantisation and drafts, through the same pipeline, and its GE graphs on all ranks, against one device.
    """
    opened = Artifact.open(artifact_path(home.artifacts, artifact))
    opened.check_runnable()
    began, device = time.monotonic(), is_for_device(opened)
    if not device and (steps is not None or seed is not None):
        raise SpecError(f"--steps and --seed are of the proof for NPUs; {opened.path} was built for this machine, whose proof has neither")
    if device:
        steps = DEFAULT_STEPS if steps is None else steps
        found = verify_device(opened, home.cache, Progress(), steps=steps, seed=seed or 0)
    elif Mesh.parse(opened.manifest.mesh).size > 1:
        found = verify_mesh(opened, Progress())
    else:
        found = verify(opened, Progress())
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for name, told in found.items():
        if device:
            click.echo(f"{name:<28} {describe(told)}   ok")
        else:
            click.echo(f"{name:<20} rows {told['rows']:>4.0f}   logits {told['logits_error']:.1e}   state {told['state_error']:.1e}   ok")
    if device:
        click.echo(f"proved in {time.monotonic() - began:.0f} s")
