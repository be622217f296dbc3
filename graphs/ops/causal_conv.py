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
    a request, and its slot holds a state. Otherwise tokens beyond a row's length give zeros, whatever (NaN included) they hold.
    """
    x, weight, state, read, write, num_computed_tokens, query_lens = args
    B, Q, C = x.shape
    taps = weight.shape[1]
    parts = [state.index_select(0, read), x]
    if write.shape[1] == Q:
        seen, states = _every_token(torch.cat(parts, 1), taps)
    else:
        inputs = torch.cat([*parts, torch.zeros(B, 1, C, dtype=x.dtype, device=x.device)], 1)
        seen, states = _last_token(inputs, taps, num_computed_tokens, query_lens)
    write_states_npu(state, write, states)
    total = (seen.float() * weight.float().t()).sum(1)
    return torch.nn.functional.silu(total).to(x.dtype).view(x.shape), state


def _every_token(inputs: Tensor, taps: int) -> tuple[Tensor, Tensor]:
    """Of inputs [B, taps-1 + Q, C] what each token sees [B*Q, taps, C], and the windows after it [B*Q, taps-1, C]."""
    B, length, C = inputs.shape
    offset = torch.arange(taps, dtype=torch.int32, device=inputs.device)
    row = torch.arange(B, dtype=torch.int32, device=inputs.device)[:, None] * length
    token = row + torch.arange(length - taps + 1, dtype=torch.int32, device=inputs.device)
    seen = inputs.view(-1, C).index_select(0, (token.view(-1, 1) + offset).view(-1)).view(-1, taps, C)
    return seen, seen[:, 1:]


def _last_token(inputs: Tensor, taps: int, num_computed_tokens: Tensor, query_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Of inputs [B, taps-1 + Q + 1, C], the last of a row zeros, what each token sees, f32, and the windows [B, taps-1, C] after the row.

    What a row does not have is read from its zeros: the past of a new request, and all that a token beyond its length would see. The
    indices depend on inputs of the step alone, and are the same in all layers.
    """
    B, length, C = inputs.shape
    past, zeros = taps - 1, length - 1
    offset = torch.arange(taps, dtype=torch.int32, device=inputs.device)
    token = torch.arange(zeros - past, dtype=torch.int32, device=inputs.device)[:, None]
    first = torch.where(num_computed_tokens == 0, past, 0)[:, None, None]
    base = (torch.arange(B, dtype=torch.int32, device=inputs.device) * length)[:, None, None]

    def rows(index: Tensor, exists: Tensor) -> Tensor:
        return (torch.where(exists, index, zeros).to(torch.int32) + base).view(-1)

    index = token + offset
    seen = inputs.float().view(-1, C).index_select(0, rows(index, (index >= first) & (token < query_lens[:, None, None])))
    after = query_lens[:, None, None] + offset[:past]
    states = inputs.view(-1, C).index_select(0, rows(after, after >= first))
    return seen.view(-1, taps, C), states.view(-1, past, C)


@causal_conv.cost
def _cost(args: CausalConv) -> Cost:
    x, weight = args.x, args.weight
    window = (weight.shape[1] - 1) * x.shape[2] * args.state.dtype.itemsize
    flops = (2 * weight.shape[1] + 4) * x.numel()
    return Cost(flops, nbytes(x, weight) + args.read.numel() * window, nbytes(x) + args.write.numel() * window)
