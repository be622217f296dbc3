"""Causal depthwise convolution over a sequence, with a pool of past inputs."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native_ops import Native
from ..primitive import Cost, Primitive, nbytes
from ..state_slots import read_states, states_to_write, write_states_npu


class CausalConv(NamedTuple):
    """Operands of `causal_conv`."""

    x: Tensor  # [B, Q, C] raw inputs of this step
    weight: Tensor  # [C, taps]
    state: Tensor  # [S, taps-1, C] pool: each slot holds the raw inputs before some token, oldest first
    read: Tensor  # [B] slot each row starts from; a row with starts == 0 starts from zeros
    write: Tensor  # [B, W] slots; W == Q writes the window after every token, W == 1 after the last valid one
    num_computed_tokens: Tensor  # [B] tokens before this step
    query_lens: Tensor  # [B] valid tokens in this step


causal_conv = Primitive("causal_conv", CausalConv, factors="_ _ c, c _, _ _ c, _, _ _, _, _ -> _ _ c, _ _ c", donates=((2, 1),))


@causal_conv.abstract
def _abstract(args: CausalConv) -> tuple[Tensor, Tensor]:
    return torch.empty(args.x.shape, dtype=args.x.dtype, device=args.x.device), torch.empty_like(args.state)


def _convolve(args: CausalConv) -> tuple[Tensor, tuple[Tensor], Tensor]:
    """Outputs [B, Q, C], the index [B*W] of the write slots, and the windows [B*W, taps-1, C] that go there."""
    x, weight, state, read, write, num_computed_tokens, query_lens = args
    Q, taps = x.shape[1], weight.shape[1]
    window = torch.cat([read_states(state, read, num_computed_tokens), x], 1)
    total = window[:, :Q].float() * weight[:, 0].float()
    for tap in range(1, taps):
        total = total + window[:, tap : tap + Q].float() * weight[:, tap].float()
    consumed = states_to_write(write, query_lens, Q)
    past = torch.arange(taps - 1, dtype=torch.int32, device=x.device)
    index = (consumed[:, :, None] + past).flatten(1).long()
    windows = window.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
    out = torch.nn.functional.silu(total).to(x.dtype)
    windows = windows.view(*write.shape, taps - 1, x.shape[2])
    return out, (write.flatten().long(),), windows.flatten(0, 1).to(state.dtype)


@causal_conv.reference
def causal_conv_reference(args: CausalConv) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution, then silu: `y[t] = silu(sum_w weight[:, w] * x[t - taps + 1 + w])`.

    Returns:
        y [B, Q, C] and the pool with the written slots replaced.
    """
    out, slots, windows = _convolve(args)
    return out, args.state.index_put(slots, windows)


@causal_conv.inplace
def _inplace(args: CausalConv) -> tuple[Tensor, Tensor]:
    out, slots, windows = _convolve(args)
    return out, args.state.index_put_(slots, windows)


def _native_abstract(x: Tensor, *rest: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_token_by_token = Native(
    "npuc_conv",
    "(Tensor x, Tensor weight, Tensor(a!) state, Tensor read, Tensor write, Tensor num_computed_tokens) -> Tensor",
    _native_abstract,
).op


@causal_conv.lowering("inductor")
def causal_conv_on_cpu(args: CausalConv) -> Any:
    """A window after every token in float32: by a kernel that reads and writes windows in the pool (lowering/cpp/conv.cpp)."""
    x, weight, state, read, write, num_computed_tokens, _ = args
    if write.shape[1] != x.shape[1] or {x.dtype, weight.dtype, state.dtype} != {torch.float32}:
        return causal_conv_reference(args)
    return _token_by_token(x, weight, state, read, write, num_computed_tokens), state


@causal_conv.lowering("npu")
def _npu(args: CausalConv) -> Any:
    """One gather lays out the inputs that each token sees; the pool is written in place.

    With a slot for every token (W == Q) a row starts from the slot that it reads, whatever `num_computed_tokens` is: such a row continues
    a request, and its slot holds a state.
    """
    x, weight, state, read, write, num_computed_tokens, query_lens = args
    B, Q, C = x.shape
    past = weight.shape[1] - 1
    every_token = write.shape[1] == Q
    before = state.index_select(0, read) if every_token else read_states(state, read, num_computed_tokens)
    inputs = torch.cat([before, x], 1).view(-1, C)
    offset = torch.arange(past + 1, dtype=torch.int32, device=x.device)
    row = torch.arange(B, dtype=torch.int32, device=x.device)[:, None] * (Q + past)
    token = (row + torch.arange(Q, dtype=torch.int32, device=x.device)).view(-1, 1)
    seen = (inputs if every_token else inputs.float()).index_select(0, (token + offset).view(-1)).view(-1, past + 1, C)
    if every_token:
        states = seen[:, 1:]
    else:
        states = inputs.index_select(0, (row + query_lens[:, None] + offset[:past]).view(-1)).view(-1, past, C)
    write_states_npu(state, write, states)
    total = (seen.float() * weight.float().t()).sum(1)
    return torch.nn.functional.silu(total).to(x.dtype).view(x.shape), state


@causal_conv.cost
def _cost(args: CausalConv) -> Cost:
    x, weight = args.x, args.weight
    window = (weight.shape[1] - 1) * x.shape[2] * args.state.dtype.itemsize
    flops = (2 * weight.shape[1] + 4) * x.numel()
    return Cost(flops, nbytes(x, weight) + args.read.numel() * window, nbytes(x) + args.write.numel() * window)
