"""tools/build/describe.py: manifests of different targets differ only in what the target decides."""

from __future__ import annotations

from dataclasses import fields

from support import tiny

from npucompile.lowering.artifact.artifact import ArtifactWriter, Manifest
from npucompile.tools.build.describe import describe


def test_targets_differ_in_what_their_rows_say_and_in_nothing_else(tmp_path):
    model = tiny.write_checkpoint(tmp_path / "npu", **tiny.NPU_SIZES)
    here, there = tiny.planned(model), tiny.planned_device(model)
    with ArtifactWriter(tmp_path / "out") as writer:
        local, device = (describe(plan, writer, tiny.QUIET) for plan in (here, there))
    differing = {field.name for field in fields(Manifest) if getattr(local, field.name) != getattr(device, field.name)}
    assert differing == {
        "backend", "build_arguments", "dtype", "limits", "mesh", "params", "rules", "source_digest", "state", "target", "tokenizer",
        "toolchain", "weights",
    }  # fmt: skip
    assert (local.target, local.backend, device.target, device.backend) == ("cpu", "eager", "ascend-a3", "ge")
    assert local.weights is not None
    assert device.weights is None
    assert device.toolchain.items() > local.toolchain.items()
