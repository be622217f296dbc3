"""Bodies of NPU operators traced on fake tensors, and main graphs that call them, in the form of lowered graphs."""

from __future__ import annotations

import hashlib
import importlib
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs.types import Aval, Leaf, Signature
from npucompile.lowering.ascend.toolchain.harness import Torchair, load

BF16, F32, I32, I64, BOOL = torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.bool
M, H, G, D, P, PAGES, T, B = 256, 4, 2, 64, 128, 8, 8, 4
HV, DK, DV, SLOTS, TAPS, C = 4, 64, 64, 17, 4, 96

Shape = tuple[tuple[int, ...], torch.dtype]
npu, aten, c10 = torch.ops.npu, torch.ops.aten, torch.ops._c10d_functional

ATTENTION: dict[str, Shape] = {
    "x": ((T, M), BF16),
    "gamma": ((M,), BF16),
    "q": ((H * D, M), BF16),
    "kv": ((2 * G * D, M), BF16),
    "o": ((M, H * D), BF16),
    "k_pool": ((PAGES, P, G, D), BF16),
    "v_pool": ((PAGES, P, G, D), BF16),
    "slots": ((T,), I32),
    "pages": ((B, 2), I32),
    "q_ends": ((B,), I64),
    "kv_lens": ((B,), I64),
    "mask": ((2048, 2048), BOOL),
}
DELTANET: dict[str, Shape] = {
    "x": ((T, M), BF16),
    "w": ((HV * (2 * DK + DV), M), BF16),
    "gate": ((T, HV), F32),
    "delta": ((SLOTS, HV, DV, DK), BF16),
    "conv": ((SLOTS, TAPS - 1, C), BF16),
    "write": ((T,), I32),
    "read": ((B, 1), I32),
    "lens": ((B,), I32),
    "accepted": ((B,), I32),
}


def loaded(cache: Path) -> Torchair:
    """torchair with its own operators, loaded once per process."""
    ta = load(cache)
    importlib.import_module("torchair.ops._npu_fused_infer_attention_score")
    return ta


def fake(mode: FakeTensorMode, shapes: Sequence[Shape]) -> list[Any]:
    with mode:
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]


def trace(mode: FakeTensorMode, fn: Callable[..., Any], shapes: Sequence[Shape]) -> fx.GraphModule:
    with mode:
        return make_fx(fn)(*fake(mode, shapes))


def attention(x, gamma, q, kv, o, k_pool, v_pool, slots, pages, q_ends, kv_lens, mask):
    h, _ = npu.npu_rms_norm(x, gamma, 1e-6)
    query = npu.npu_linear(h, q).view(T, H, D)
    key, value = npu.npu_linear(h, kv).view(T, 2 * G, D).split(G, 1)
    k2, v2 = npu.npu_scatter_pa_kv_cache_functional(key.contiguous(), value.contiguous(), k_pool, v_pool, slots, cache_mode="Norm")
    out, _ = torch.ops.air.npu_fused_infer_attention_score(
        query,
        k2.view(PAGES, P, G * D),
        v2.view(PAGES, P, G * D),
        atten_mask=mask,
        block_table=pages,
        actual_seq_lengths=q_ends,
        actual_seq_lengths_kv=kv_lens,
        num_heads=H,
        num_key_value_heads=G,
        scale=D**-0.5,
        input_layout="TND",
        sparse_mode=3,
        block_size=P,
    )
    y = c10.wait_tensor(c10.all_reduce(npu.npu_linear(out.view(T, H * D), o), "sum", "tp"))
    k_pool.copy_(k2)
    v_pool.copy_(v2)
    return (x + y,)


def deltanet(x, w, gate, delta, conv, write, read, lens, accepted):
    q, k, v = npu.npu_linear(x, w).view(T, HV, 2 * DK + DV).split([DK, DK, DV], -1)
    old = conv.index_select(0, read.view(B))
    npu.npu_scatter_nd_update_(conv, read, old * 2)
    y, new = npu.npu_recurrent_gated_delta_rule_functional(
        q.contiguous(), k.contiguous(), v.contiguous(), delta, beta=gate.to(BF16), scale=1.0,
        actual_seq_lengths=lens, ssm_state_indices=write, num_accepted_tokens=accepted, g=gate,
    )  # fmt: skip
    delta.copy_(new)
    y = y.view(T, HV * DV)
    return (x + y, old)


class Main:
    """A main graph under construction: operands with leaf names, calls of bodies."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.root = torch.nn.Module()
        self.graph = fx.Graph()
        self.leaves: dict[str, list[Leaf]] = {"params": [], "state": [], "inputs": []}

    def operand(self, leaf: str, shape: Shape) -> fx.Node:
        node = self.graph.placeholder(leaf.replace(".", "_"))
        node.meta.update(val=fake(self.mode, [shape])[0], leaf=leaf)
        self.leaves[leaf.partition(".")[0]].append(Leaf(leaf, Aval(*shape)))
        return node

    def body(self, name: str, fn: Callable[..., Any], shapes: Sequence[Shape]) -> None:
        setattr(self.root, name, trace(self.mode, fn, shapes))

    def call(self, body: str, *args: fx.Node) -> list[fx.Node]:
        node = self.graph.call_module(body, args)
        vals = [result.meta["val"] for result in getattr(self.root, body).graph.output_node().args[0]]
        node.meta["val"] = tuple(vals)
        nodes = []
        for i, val in enumerate(vals):
            nodes.append(self.graph.call_function(operator.getitem, (node, i)))
            nodes[-1].meta["val"] = val
        return nodes

    def done(self, *results: fx.Node) -> tuple[fx.GraphModule, Signature]:
        self.graph.output(tuple(results))
        outputs = tuple(Leaf(f"out{i}", Aval(tuple(n.meta["val"].shape), n.meta["val"].dtype)) for i, n in enumerate(results))
        signature = Signature(tuple(self.leaves["params"]), tuple(self.leaves["state"]), tuple(self.leaves["inputs"]), outputs)
        return fx.GraphModule(self.root, self.graph), signature


def two_kinds(layers: int) -> tuple[fx.GraphModule, Signature]:
    """`layers` layers, attention and deltanet in turn, each with pools of its own."""
    main = Main()
    kinds = [("attention", ATTENTION) if i % 2 == 0 else ("deltanet", DELTANET) for i in range(layers)]
    params, pools = {"gamma", "q", "kv", "o", "w"}, {"k_pool", "v_pool", "delta", "conv"}
    nodes: dict[tuple[int, str], fx.Node] = {}
    for part, names in (("params", params), ("state", pools)):
        for i, (_, shapes) in enumerate(kinds):
            for name in shapes:
                if name in names:
                    nodes[i, name] = main.operand(f"{part}.layers.{i}.{name}", shapes[name])
    shared = {name: main.operand(f"inputs.{name}", shape) for name, shape in (ATTENTION | DELTANET).items() if name not in params | pools}
    main.body("attention", attention, list(ATTENTION.values()))
    main.body("deltanet", deltanet, list(DELTANET.values()))
    x = shared["x"]
    for i, (kind, shapes) in enumerate(kinds):
        x, *_ = main.call(kind, *(x if name == "x" else nodes.get((i, name)) or shared[name] for name in shapes))
    return main.done(x)


def inlined(main: fx.GraphModule) -> fx.GraphModule:
    """The same graph without calls."""
    graph, env = fx.Graph(), {}
    for node in main.graph.nodes:
        if node.op == "call_module":
            inner = {}
            body = main.get_submodule(node.target)
            for i, placeholder in enumerate(n for n in body.graph.nodes if n.op == "placeholder"):
                inner[placeholder] = env[node.args[i]]
            for sub in body.graph.nodes:
                if sub.op == "call_function":
                    inner[sub] = graph.node_copy(sub, inner.__getitem__)
            env[node] = [inner[result] for result in body.graph.output_node().args[0]]
        elif node.op == "call_function":
            env[node] = env[node.args[0]][node.args[1]]
        elif node.op == "placeholder":
            env[node] = graph.node_copy(node)
        else:
            graph.output(tuple(env[result] for result in node.args[0]))
    return fx.GraphModule(torch.nn.Module(), graph)


def meanings(ops: Sequence[Any], operands: dict[str, int]) -> Counter[str]:
    """Counts operators by type, attributes and the computation of their inputs, not by name; `operands` maps tensor names to operands."""
    known = {tensor: f"operand {i}" for tensor, i in operands.items()}
    counts: Counter[str] = Counter()
    for op in ops:
        attrs = [(key, value.SerializeToString(deterministic=True)) for key, value in sorted(op.attr.items())]
        inputs = [known[tensor] if tensor else "" for tensor in op.input if not tensor.endswith(":-1")]
        meaning = hashlib.sha256(repr((op.type, attrs, inputs)).encode()).hexdigest()
        known |= {f"{op.name}:{i}": f"{meaning}:{i}" for i in range(len(op.output_desc))}
        counts[meaning] += 1
    return counts
