"""lowering/ascend/shipped.py: a bucket's graph is read by the backend that wrote it, and none where no NPU runs it."""

from __future__ import annotations

import pytest
from support import ranks
from support import small_images as images

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.ascend.acl_graph.file import AclFile
from npucompile.lowering.ascend.ge_file import GeFile
from npucompile.lowering.ascend.shipped import shipped_graph


@pytest.mark.parametrize(("backend", "kind"), [("ge", GeFile), ("aclgraph", AclFile)])
def test_a_graph_is_of_the_backend_that_wrote_it(tmp_path_factory, backend, kind):
    artifact = images.shipped(ranks.SIZES, tmp_path_factory, backend=backend)
    graphs = [shipped_graph(artifact, entry) for entry in artifact.manifest.graphs]
    assert [(type(graph), graph.outputs) for graph in graphs] == [(kind, len(entry.outputs)) for entry in artifact.manifest.graphs]


def test_what_runs_on_this_cpu_has_none(tiny_artifact):
    artifact = Artifact.open(tiny_artifact)
    assert {shipped_graph(artifact, entry) for entry in artifact.manifest.graphs} == {None}
