"""tools/advisor/launch_lines/findings.py: a router has its own address, and none of a server's variables."""

from __future__ import annotations

import pytest

from npucompile.tools.advisor.launch_lines.imported import import_text

ROUTER = "python -m sglang_router.launch_router --worker-urls http://a:8000 --host 0.0.0.0 --port 6688"


@pytest.mark.parametrize("variable", ["HCCL_BUFFSIZE=200", "HCCL_SOCKET_IFNAME=eth0", "SGLANG_ENABLE_GRPC=1", "PYTORCH_NPU_ALLOC_CONF=x"])
def test_a_router_reads_no_variable_of_servers(variable):
    found = next(each for each in import_text(f"export {variable}\n{ROUTER}").findings if each.kind == "variable")
    assert (found.status, found.why.startswith("a router reads none of a server's variables")) == ("unnecessary", True)
    (server,) = import_text(f"export {variable}\nsglang serve m").roles
    assert all("router" not in each.why for each in server.findings)


def test_a_misspelt_variable_is_refused_beside_a_router_too():
    (found,) = [each for each in import_text(f"HCCL_SOCKET_IFNAM=eth0 {ROUTER}").findings if each.kind == "variable"]
    assert found.status == "refused"
