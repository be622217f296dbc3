"""runtime/distributed/process_groups.py: collectives reach the ranks of the group that a graph names, in real processes."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from support import ranks

from npucompile.graphs.types import Mesh
from npucompile.runtime.distributed.control_plane import RankError
from npucompile.runtime.distributed.process_groups import ProcessGroups
from npucompile.runtime.distributed.rendezvous import RendezvousConfig, open_store

RUN = """
import json, sys, torch
from npucompile.graphs.types import Mesh
from npucompile.runtime.distributed.rendezvous import RendezvousConfig, open_store, substore
from npucompile.runtime.distributed.process_groups import ProcessGroups
torch.set_num_threads(1)
rank, port = int(sys.argv[1]), int(sys.argv[2])
config = RendezvousConfig(rank, 4, "127.0.0.1", port, 4, 90, hosts_store=rank == 0)
store = open_store(config)
ops = torch.ops._c10d_functional
with ProcessGroups(Mesh.parse("dp=2,tp=2"), rank, substore(store, config, "gloo"), "127.0.0.1", 90):
    x = torch.tensor([10.0 ** rank])
    result = {n: ops.wait_tensor(ops.all_reduce(x, "sum", n)).item() for n in ("tp", "dp", "world")}
    result["gathered"] = ops.wait_tensor(ops.all_gather_into_tensor(x, 2, "dp")).tolist()
    result["scattered"] = ops.wait_tensor(ops.reduce_scatter_tensor(x.repeat(2) * torch.tensor([1.0, 2.0]), "sum", 2, "tp")).tolist()
    result["exchanged"] = ops.wait_tensor(ops.all_to_all_single(x.repeat(4), [1] * 4, [1] * 4, "world")).tolist()
# The same four ranks twice: a group of their own for expert dispatch, and one that two symbols share.
mesh = Mesh.parse("dp=4,tp=1")
with ProcessGroups(mesh, rank, substore(store, config, "more"), "127.0.0.1", 90, symbols=["world", "dp", "dispatch"]) as more:
    result["symbols"] = sorted(more.groups)
    result["shared"] = more.groups["dp"] is more.groups["world"], more.groups["dispatch"] is more.groups["world"]
    first = more.groups["dispatch"].allreduce([y := torch.tensor([1.0])])
    result["dispatch"] = ops.wait_tensor(ops.all_reduce(x, "sum", "dp")).item(), (first.wait(), y.item())[1]
try:
    ops.all_reduce(x, "sum", "tp")
except RuntimeError:
    result["freed"] = True
print(json.dumps(result), flush=True)
store.add("done", 1)
while rank == 0 and store.add("done", 0) < 4: pass
"""


def test_real_ranks_reach_each_other_by_the_names_of_graphs():
    port = ranks.free_port()
    processes = [ranks.spawn([sys.executable, "-c", RUN, rank, port], ranks.environment()) for rank in range(4)]
    ended = [ranks.finished(process) for process in processes]
    assert [status for status, _, _ in ended] == [0] * 4, ended
    results = [json.loads(out) for _, out, _ in ended]
    assert [result["tp"] for result in results] == [11, 11, 1100, 1100]
    assert [result["dp"] for result in results] == [101, 1010, 101, 1010]
    assert [result["world"] for result in results] == [1111] * 4
    assert [result["gathered"] for result in results] == [[1, 100], [10, 1000]] * 2
    assert [result["scattered"] for result in results] == [[11], [22], [1100], [2200]]
    assert [result["exchanged"] for result in results] == [[1, 10, 100, 1000]] * 4
    assert all(result["freed"] for result in results)
    assert [result["symbols"] for result in results] == [["dispatch", "dp", "world"]] * 4
    assert [result["shared"] for result in results] == [[True, False]] * 4
    assert [result["dispatch"] for result in results] == [[1111, 4]] * 4


def test_ranks_that_do_not_connect_are_named_and_no_name_stays_bound():
    store = open_store(RendezvousConfig(0, 2, "127.0.0.1", 0, 2, 5, hosts_store=True))
    with pytest.raises(RankError, match=r"rank 0 cannot connect to ranks \[0, 1\] of its group 'tp'"):
        ProcessGroups(Mesh.parse("tp=2"), 0, store, "127.0.0.1", 0.5)
    with pytest.raises(RuntimeError):
        torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", "world")
