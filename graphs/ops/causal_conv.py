"""Causal depthwise convolution over a sequence, with a pool of past inputs.

The pool has one of two layouts. With a window for every token, [S, taps-1, C], a step of Q tokens writes the window after each to a slot
of its own. With one window a request, [S, taps-1 + k, C] where k = Q-1 > 0, such a step finds and leaves all inputs in the first slot that
it writes: the window after its n-th token is in rows n-1 to n-1 + taps-2. Windows of neighbouring tokens overlap, which makes fewer bytes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PrimitiveError
from ..native_ops import Native
from ..primitive import Cost, Primitive, nbytes
from ..state_slots import num_accepted_tokens, read_states, states_to_write, write_states_npu


class CausalConv(NamedTuple):
    """Operands of `causal_conv`."""

    x: Tensor  # [B, Q, C] raw inputs of this step
    weight: Tensor  # [C, taps]
    state: Tensor  # [S, taps-1, C] pool: each slot holds the raw inputs before some token, oldest first; or [S, taps-1 + Q-1, C]
    read: Tensor  # [B] slot each row starts from; a row with starts == 0 starts from zeros
    write: Tensor  # [B, W] slots; W == Q writes the window after every token, W == 1 after the last valid one
    num_computed_tokens: Tensor  # [B] tokens before this step
    query_lens: Tensor  # [B] valid tokens in this step
    dtype: torch.dtype  # of the result; f32 where the next operator computes in it


causal_conv = Primitive("causal_conv", CausalConv, factors="_ _ c, c _, _ _ c, _, _ _, _, _ -> _ _ c, _ _ c", donates=((2, 1),))


@causal_conv.abstract
def _abstract(args: CausalConv) -> tuple[Tensor, Tensor]:
    return torch.empty(args.x.shape, dtype=args.dtype, device=args.x.device), torch.empty_like(args.state)


def _has_one_window(args: CausalConv) -> bool:
    return args.state.shape[1] > args.weight.shape[1] - 1


def _window(args: CausalConv) -> Tensor:
    """Inputs before the step [B, taps-1, C]; zeros where a request is new."""
    x, weight, state, read, write, num_computed_tokens, *_ = args
    past = weight.shape[1] - 1
    if not _has_one_window(args) or write.shape[1] == 1:
        return read_states(state, read, num_computed_tokens)[:, :past]
    if state.shape[1] != past + x.shape[1] - 1:
        raise PrimitiveError(
            f"causal_conv has a pool of {state.shape[1]} inputs a slot, {weight.shape[1]} taps and {x.shape[1]} tokens a row; legal are "
            f"{past} or {past + x.shape[1] - 1} inputs"
        )
    inputs = read_states(state, write[:, 0], num_computed_tokens)
    rows = num_accepted_tokens(read, write)[:, None] - 1 + torch.arange(past, dtype=torch.int32, device=x.device)
    return inputs.gather(1, rows[:, :, None].long().expand(-1, -1, x.shape[2]))


def _convolve(args: CausalConv) -> tuple[Tensor, tuple[Tensor], Tensor]:
    """Outputs [B, Q, C], the index [N] of written slots, and what goes there [N, ...] in the layout of the pool."""
    x, weight, state, _, write, _, query_lens, dtype = args
    Q, taps = x.shape[1], weight.shape[1]
    window = torch.cat([_window(args), x], 1)
    total = window[:, :Q].float() * weight[:, 0].float()
    for tap in range(1, taps):
        total = total + window[:, tap : tap + Q].float() * weight[:, tap].float()
    out = torch.nn.functional.silu(total).to(dtype)
    if _has_one_window(args) and write.shape[1] > 1:
        return out, (write[:, 0].long(),), window[:, 1:].to(state.dtype)
    consumed = states_to_write(write, query_lens, Q)
    past = torch.arange(taps - 1, dtype=torch.int32, device=x.device)
    index = (consumed[:, :, None] + past).flatten(1).long()
    windows = window.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
    windows = windows.view(*write.shape, taps - 1, x.shape[2]).flatten(0, 1)
    return out, (write.flatten().long(),), _filled_up(windows, state).to(state.dtype)


def _filled_up(windows: Tensor, state: Tensor) -> Tensor:
    """[N, taps-1, C] with zeros behind, as long as a slot of the pool: only a step of several tokens has more inputs."""
    more = state.shape[1] - windows.shape[1]
    return torch.cat([windows, windows.new_zeros(windows.shape[0], more, windows.shape[2])], 1) if more else windows


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


_rows = Native(
    "npuc_conv_rows",
    "(Tensor x, Tensor weight, Tensor(a!) state, Tensor read, Tensor write, Tensor num_computed_tokens, Tensor query_lens) -> Tensor",
    lambda x, *rest: torch.empty(x.shape, dtype=torch.float32, device=x.device),
).op


@causal_conv.lowering("inductor")
def causal_conv_on_cpu(args: CausalConv) -> Any:
    """By kernels that read and write windows in the pool: one after every token (lowering/cpp/conv.cpp), or the last one of a row alone,
    with results of float32 (lowering/cpp/conv_rows.cpp)."""
    x, weight, state, read, write, num_computed_tokens, query_lens, dtype = args
    one_dtype = {x.dtype, weight.dtype, state.dtype} in ({torch.float32}, {torch.bfloat16})
    if _has_one_window(args) or not one_dtype:
        return causal_conv_reference(args)
    if write.shape[1] == x.shape[1] and dtype == x.dtype:
        return _token_by_token(x, weight, state, read, write, num_computed_tokens), state
    if write.shape[1] == 1:
        return _rows(x, weight, state, read, write, num_computed_tokens, query_lens).to(dtype), state
    return causal_conv_reference(args)


@causal_conv.lowering("npu")
def _npu(args: CausalConv) -> Any:
    """One gather lays out the inputs that each token sees; the pool is written in place.

    With a slot for every token (W == Q) a row starts from the slot that it reads, whatever `num_computed_tokens` is: such a row continues
    a request, and its slot holds a state. Otherwise tokens beyond a row's length give zeros, whatever (NaN included) they hold.

    Raises:
        PrimitiveError: the pool has one window a request, and a step several tokens.
    """
    x, weight, state, read, write, num_computed_tokens, query_lens, dtype = args
    B, Q, C = x.shape
    taps = weight.shape[1]
    if _has_one_window(args) and write.shape[1] > 1:
        raise PrimitiveError(
            f"causal_conv has a pool of {state.shape[1]} inputs a slot and {taps} taps; legal without operators of vllm-ascend, or in GE "
            f"graphs, are {taps - 1} inputs"
        )
    parts = [state.index_select(0, read)[:, : taps - 1], x]
    if write.shape[1] == Q:
        seen, states = _every_token(torch.cat(parts, 1), taps)
    else:
        inputs = torch.cat([*parts, torch.zeros(B, 1, C, dtype=x.dtype, device=x.device)], 1)
        seen, states = _last_token(inputs, taps, num_computed_tokens, query_lens)
    write_states_npu(state, write, _filled_up(states, state))
    total = (seen.float() * weight.float().t()).sum(1)
    return torch.nn.functional.silu(total).to(dtype).view(x.shape), state


NPU_CHANNELS = 16
"""vllm-ascend's operator takes multiples of so many channels, and four taps where windows of several tokens overlap
(csrc/moe/causal_conv1d/op_host/causal_conv1d_tiling_validation.h and causal_conv1d_tiling_utils.h at 182b75e)."""


@causal_conv.lowering("npu", needs=("aclgraph", "vllm-ascend"))
def _npu_vllm(args: CausalConv) -> Any:
    """vllm-ascend's operator where the pool has one window a request, and the step a slot for every token.

    A row continues a request, whatever `num_computed_tokens` is.

    Raises:
        PrimitiveError: the operator does not take these channels or taps.
    """
    x, weight, state, read, write, *_ = args
    if not _has_one_window(args) or write.shape[1] == 1:
        return _npu(args)
    (C, taps), inputs = weight.shape, weight.shape[1] - 1 + x.shape[1] - 1
    if C % NPU_CHANNELS or taps != 4 or state.shape[1] != inputs:
        raise PrimitiveError(
            f"causal_conv has {C} channels, {taps} taps and {state.shape[1]} inputs a slot; legal are multiples of {NPU_CHANNELS}, 4 and "
            f"{inputs}"
        )
    convolve = torch.ops.npucompile_packages.causal_conv1d_update
    out = convolve(x.contiguous(), weight.t().contiguous(), state, write[:, 0].contiguous(), num_accepted_tokens(read, write))
    return out.to(args.dtype), state


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
    return Cost(flops, nbytes(x, weight) + args.read.numel() * window, x.numel() * args.dtype.itemsize + args.write.numel() * window)
