"""Builds for NPUs of small models: every operator of every bucket is legal, but for sizes that no kernel is made for."""

from __future__ import annotations

import pytest
from support import ranks, small_images

from npucompile.tools.inspection import legality


@pytest.mark.parametrize("quantization", ["none", "w8a8", "w4a8"])
@pytest.mark.parametrize(
    ("backend", "packages"),
    [("ge", ()), ("aclgraph", ()), ("aclgraph", ("sgl-kernel-npu", "vllm-ascend"))],
    ids=["ge", "captured", "captured with packages"],
)
@pytest.mark.short_cases("ge-none", "ge-w4a8", "captured-w8a8", "captured with packages-w4a8")
def test_every_operator_of_every_bucket_is_legal(quantization, backend, packages, tmp_path_factory):
    artifact = small_images.shipped(ranks.SIZES, tmp_path_factory, quantization, backend=backend, packages=packages)
    for entry in artifact.manifest.graphs:
        told = legality.illegal(artifact, entry)["illegal"]
        assert [f"{row['type']}: {row['message']}" for row in told if not row["sizes"]] == [], entry.bucket.name
