"""`npucompile verify`: repeats the verification of a build."""

from __future__ import annotations

import json
import time

import click

from ...graphs.errors import SpecError
from ...graphs.types import Mesh
from ...lowering.artifact.artifact import Artifact
from ...models.family_file import FamilyFile
from ..agreement.executables import verify
from ..cli import Home
from ..locate import artifact_path
from ..progress import Progress
from ..prove.mesh import verify_mesh
from ..prove.npu import DEFAULT_STEPS, describe, is_for_device, verify_device


@click.command("verify")
@click.argument("artifact", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as JSON.")
@click.option("--steps", type=click.IntRange(1, 64), help=f"For NPUs: decode steps of the small model.  [default: {DEFAULT_STEPS}]")
@click.option("--seed", type=click.IntRange(0), help="For NPUs: seed of the small model's weights, prompts and drafts.  [default: 0]")
@click.pass_obj
def command(home: Home, artifact: str | None, as_json: bool, steps: int | None, seed: int | None) -> None:
    """Verify ARTIFACT again: a directory or the name of a built model, by default the newest artifact.

    Reads every file and checks its digest. For this machine, compares each bucket's executable with the eager reference, on full batches,
    on padded batches and row by row, with NaN in everything a live row must not read; the ranks of a mesh run in one process and
    are compared with one device. For NPUs, checks each shipped GE graph, then builds a small model with the same layers, mesh,
    quantization and drafts, and compares an emulated run of its GE graphs on all ranks with one device.

    Example: npucompile verify qwen3.5-tiny
    """
    opened = Artifact.open(artifact_path(home.artifacts, artifact), again=True)
    opened.check_runnable()
    if family := FamilyFile.recorded(opened.manifest.model):
        family.check_unchanged(opened.path)
    began, device = time.monotonic(), is_for_device(opened)
    if not device and (steps is not None or seed is not None):
        raise SpecError(f"--steps and --seed are for artifacts built for NPUs; {opened.path} was built for this machine")
    if device:
        steps = DEFAULT_STEPS if steps is None else steps
        measurements = verify_device(opened, home.cache, Progress(), steps=steps, seed=seed or 0)
    elif Mesh.parse(opened.manifest.mesh).size > 1:
        measurements = verify_mesh(opened, Progress())
    else:
        measurements = verify(opened, Progress())
    if as_json:
        click.echo(json.dumps(measurements, indent=1))
        return
    for name, row in measurements.items():
        if device:
            click.echo(f"{name:<28} {describe(row)}   ok")
        else:
            click.echo(f"{name:<20} rows {row['rows']:>4.0f}   logits {row['logits_error']:.1e}   state {row['state_error']:.1e}   ok")
    if device:
        click.echo(f"proved in {time.monotonic() - began:.0f} s")
