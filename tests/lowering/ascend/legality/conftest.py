"""Graphs in which every operator is legal: one step for GE, the same captured, and operators of packages."""

from __future__ import annotations

import pytest
from support import legal_acl, legal_graph

from npucompile.lowering.ascend.acl_graph.file import AclFile
from npucompile.lowering.ascend.ge_file import GeFile


@pytest.fixture(scope="package")
def legal(tmp_path_factory: pytest.TempPathFactory) -> GeFile:
    return legal_graph.legal(tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="package")
def captured(tmp_path_factory: pytest.TempPathFactory) -> AclFile:
    return legal_acl.legal(tmp_path_factory.mktemp("stubs"))
