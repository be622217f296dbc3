"""Operators that create, move and select elements."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ....graphs.errors import LoweringError
from . import type_rules, work
from .call import INT4, Call, Function, Int4, Results, Value, same_dtype, unary
from .record import NpuOperator, TorchForm
from .trials import ANY_INTEGERS, Trial, gather_index


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


def _fill(call: Call) -> Results:
    value = call.tensor("value")
    if value.numel() != 1:
        raise LoweringError(f"{call.op}: value is {tuple(value.shape)}; legal is one number")
    return value.reshape(()).expand(call.integers("dims")).clone()


def _range(call: Call) -> Results:
    bounds = [call.tensor(slot) for slot in ("start", "limit", "delta")]
    # The only operator whose inputs may differ in dtype: torchair passes the limit in int64 and casts the result.
    dtype = functools.reduce(torch.promote_types, [bound.dtype for bound in bounds])
    return torch.arange(*(bound.item() for bound in bounds), dtype=dtype)


def _reshape(call: Call) -> Results:
    call.expect(axis=0, num_axes=-1)
    return call.tensor("x").reshape(call.integers("shape"))


def _unsqueeze(call: Call) -> Results:
    x, axes = call.tensor("x"), call.attr("axes", [])
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _squeeze(call: Call) -> Results:
    x, axes = call.tensor("x"), call.attr("axis", [])
    axes = [axis % x.dim() for axis in axes] or [i for i, size in enumerate(x.shape) if size == 1]
    if [axis for axis in axes if x.shape[axis] != 1]:
        raise LoweringError(f"{call.op}: axes {axes} of {tuple(x.shape)}; legal are those of size 1")
    return x.squeeze(axes)


def _bitcast(call: Call) -> Results:
    """Same bits, another dtype; int4 is represented by the words that hold it."""
    value, number, keep = call.value("x"), call.attr("type"), bool(call.attr("keep_dim", False))
    if number == INT4 or isinstance(value, Int4):
        return _bitcast_int4(call, value, number, keep)
    x, dtype = call.tensor("x"), call.dtype("type")
    if keep or x.element_size() < dtype.itemsize:
        raise LoweringError(
            f"{call.op}: {x.dtype} as {dtype}, keep_dim {keep}; legal are dtypes of no greater size, or int32 as int4 with keep_dim"
        )
    parts = x.element_size() // dtype.itemsize
    return x.view(dtype) if parts == 1 else x.contiguous().unsqueeze(-1).view(dtype)


def _convert_view_of_dtype(ta: Any, earlier: Any) -> Any:
    """GE puts the parts of a number that become several in a dimension of their own, torch in the last one."""

    def convert(x: Any, dtype: int, *, meta_outputs: Any) -> Any:
        result = earlier(x, dtype)
        return result if list(x.symsize) == list(meta_outputs.size) else ta.ge.Reshape(result, meta_outputs.size)

    return convert


def _bitcast_int4(call: Call, value: Value | None, number: int, keep: bool) -> Results:
    if keep and number == INT4 and isinstance(value, torch.Tensor) and value.dtype == torch.int32:
        return Int4(value)
    operand = f"int4 in {tuple(value.packed.shape)} int32" if isinstance(value, Int4) else str(getattr(value, "dtype", None))
    raise LoweringError(f"{call.op}: {operand} as dtype number {number}, keep_dim {keep}; legal is int32 as {INT4} (int4) with keep_dim")


def _transpose(call: Call) -> Results:
    return call.tensor("x").permute(call.integers("perm"))


def _broadcast_to(call: Call) -> Results:
    return call.tensor("x").broadcast_to(call.integers("shape"))


def _tile(call: Call) -> Results:
    x, multiples = call.tensor("x"), call.integers("multiples")
    if len(multiples) != x.dim():
        raise LoweringError(f"{call.op}: multiples {multiples} of {tuple(x.shape)}; legal is one a dimension")
    return x.repeat(multiples)


def _concat(slot: str) -> Function:
    """Inputs `x0`, `x1` ... along the axis in input `slot`."""

    def run(call: Call) -> Results:
        axis, parts = call.integer(slot), call.tensors("x")
        same_dtype(call, **{f"x{i}": part for i, part in enumerate(parts)})
        call.expect(N=len(parts))
        return torch.cat(parts, axis)

    return run


def _pack(call: Call) -> Results:
    parts = call.tensors("x")
    same_dtype(call, **{f"x{i}": part for i, part in enumerate(parts)})
    call.expect(N=len(parts))
    return torch.stack(parts, call.attr("axis", 0))


def _unpack(call: Call) -> Results:
    x, axis = call.tensor("x"), call.attr("axis", 0)
    call.expect(num=x.shape[axis])
    parts: tuple[torch.Tensor, ...] = x.unbind(axis)
    return parts


def _split_v(call: Call) -> Results:
    x, sizes, axis = call.tensor("x"), call.integers("size_splits"), call.integer("split_dim")
    call.expect(num_split=len(sizes))
    if sizes.count(-1) == 1:
        # The part of size -1 gets the rest.
        sizes[sizes.index(-1)] = x.shape[axis] - sum(sizes) - 1
    if min(sizes) < 0 or sum(sizes) != x.shape[axis]:
        raise LoweringError(f"{call.op}: parts of {sizes} of {tuple(x.shape)} along {axis}; legal are parts of the whole, one of them -1")
    return torch.split(x, sizes, axis)


def _split(call: Call) -> Results:
    x, axis, parts = call.tensor("x"), call.integer("split_dim"), call.attr("num_split")
    if x.shape[axis] % parts:
        raise LoweringError(f"{call.op}: {parts} parts of {tuple(x.shape)} along {axis}; legal are equal ones")
    return x.chunk(parts, axis)


def _strided_slice(call: Call) -> Results:
    call.expect(begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)
    x, begin, end, axes, strides = call.tensor("x"), *(call.integers(slot) for slot in ("begin", "end", "axes", "strides"))
    if len({len(begin), len(end), len(axes), len(strides)}) != 1 or min(strides, default=1) < 1:
        raise LoweringError(f"{call.op}: begin {begin}, end {end}, axes {axes}, strides {strides}; legal are as many, strides from 1")
    parts = [slice(None)] * x.dim()
    for axis, first, last, step in zip(axes, begin, end, strides, strict=True):
        parts[axis] = slice(first, last, step)
    return x[tuple(parts)]


def _pad(call: Call) -> Results:
    call.expect(mode="constant", paddings_contiguous=True)
    x, value, paddings = call.tensor("x"), call.tensor("constant_values"), call.integers("paddings")
    # torchair leaves the pad value in float32 whatever it pads; the bits are the same for zero alone.
    if value.dtype != x.dtype and value.item():
        raise LoweringError(f"{call.op} pads {x.dtype} with {value.item()} in {value.dtype}; legal are one dtype, or zero")
    if len(paddings) != 2 * x.dim():
        raise LoweringError(f"{call.op}: paddings {paddings} of {tuple(x.shape)}; legal are two a dimension")
    backwards = [pad for i in reversed(range(x.dim())) for pad in paddings[2 * i : 2 * i + 2]]
    return torch.nn.functional.pad(x, backwards, value=value.item())


def _shape(call: Call) -> Results:
    return torch.tensor(call.tensor("x").shape, dtype=call.dtype("dtype", 3))


def _gather(call: Call) -> Results:
    call.expect(batch_dims=0)
    call.ignore("is_preprocessed")
    x, indices, axis = call.tensor("x"), call.tensor("indices"), call.integer("axis")
    at = _indices(call, indices, x.shape[axis], bool(call.attr("negative_index_support", False)))
    axis %= x.dim()
    return x.index_select(axis, at.flatten()).reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def _gather_elements(call: Call) -> Results:
    x, index, axis = call.tensor("x"), call.tensor("index"), call.attr("dim", 0)
    return x.gather(axis, _indices(call, index, x.shape[axis], negative=False))


def _indices(call: Call, indices: torch.Tensor, size: int, negative: bool) -> torch.Tensor:
    """Indices as int64, counted from 0; refuses those out of range, for which the device's behaviour is not documented."""
    lowest = -size if negative else 0
    if indices.dtype not in (torch.int32, torch.int64):
        raise LoweringError(f"{call.op}: indices are {indices.dtype}; legal are int32 and int64")
    if indices.numel() and not lowest <= int(indices.min()) <= int(indices.max()) < size:
        raise LoweringError(f"{call.op}: indices from {int(indices.min())} to {int(indices.max())}; legal are {lowest} to {size - 1}")
    return torch.where(indices < 0, indices + size, indices).long()


def _assign(call: Call) -> Results:
    call.ignore("validate_shape", "use_locking")
    ref, value = call.tensor("ref"), call.tensor("value")
    same_dtype(call, ref=ref, value=value)
    if ref.shape != value.shape:
        raise LoweringError(f"{call.op}: value {tuple(value.shape)} for {tuple(ref.shape)}; legal is the same")
    return value


def npu_prefetch(source: torch.Tensor, dependency: torch.Tensor | None, max_size: int, offset: int = 0) -> None:
    """Moves up to `max_size` bytes of `source` [...] into the cache once `dependency` is there; computes nothing.

    Raises:
        LoweringError: there is nothing to wait for, or the bytes are none of the source.
    """
    if dependency is None:
        raise LoweringError("npu_prefetch waits for nothing; legal is a tensor of what it runs behind")
    if max_size < 1 or not 0 <= offset < source.nbytes:
        raise LoweringError(
            f"npu_prefetch: {max_size} bytes from {offset} of {source.nbytes}; legal are 1 or more, from 0 to {source.nbytes - 1}"
        )


def _fetch(call: Call) -> Results:
    call.expect(type=6)
    source = call.tensor("src")
    npu_prefetch(source, source if call.op.after else None, call.attr("max_size"), call.attr("offset", 0))
    return ()


OPERATORS = (
    NpuOperator(
        ("Identity",),
        torch=(TorchForm("aten.clone.default"), TorchForm("aten.copy_.default")),
        run=unary(_itself),
        types=type_rules.same,
        keeps_format=True,
        copies=1,
        trial=ANY_INTEGERS,
    ),
    NpuOperator(("TensorMove",), run=unary(_itself), types=type_rules.same, copies=1, trial=ANY_INTEGERS),
    NpuOperator(("TransData",), types=type_rules.same, keeps_format=True, copies=1),
    NpuOperator(("ZerosLike",), run=unary(torch.zeros_like), types=type_rules.same, trial=ANY_INTEGERS),
    NpuOperator(("OnesLike",), run=unary(torch.ones_like), types=type_rules.same, trial=ANY_INTEGERS),
    NpuOperator(("Fill",), run=_fill, types=type_rules.fill_of),
    NpuOperator(("Range",), run=_range, types=type_rules.range_of),
    NpuOperator(("Shape",), run=_shape),
    NpuOperator(("Reshape",), run=_reshape, types=type_rules.reshape, view=True, trial=ANY_INTEGERS),
    NpuOperator(("Squeeze",), run=_squeeze, types=type_rules.squeeze, view=True, trial=ANY_INTEGERS),
    NpuOperator(("Unsqueeze",), run=_unsqueeze, types=type_rules.unsqueeze, view=True, trial=ANY_INTEGERS),
    NpuOperator(
        ("Bitcast",),
        run=_bitcast,
        types=type_rules.bitcast,
        keeps_format=True,
        view=True,
        casts="type",
        converters={"aten.view.dtype": _convert_view_of_dtype},
    ),
    NpuOperator(("Transpose",), run=_transpose, types=type_rules.transpose, copies=1, trial=ANY_INTEGERS, time=work.KernelTime(1.2e-5)),
    NpuOperator(("BroadcastTo",), run=_broadcast_to, types=type_rules.broadcast_to, trial=ANY_INTEGERS),
    NpuOperator(("Tile",), run=_tile, trial=ANY_INTEGERS),
    NpuOperator(("ConcatV2",), run=_concat("concat_dim"), types=type_rules.concat, trial=ANY_INTEGERS),
    NpuOperator(("Concat",), run=_concat("concat_dim"), trial=ANY_INTEGERS),
    NpuOperator(("Pack",), run=_pack, types=type_rules.pack, trial=ANY_INTEGERS),
    NpuOperator(("Unpack",), run=_unpack, trial=ANY_INTEGERS),
    NpuOperator(("Split",), run=_split, trial=ANY_INTEGERS),
    NpuOperator(("SplitV",), run=_split_v, trial=ANY_INTEGERS),
    NpuOperator(("StridedSliceV2",), run=_strided_slice, work=work.indexed, trial=ANY_INTEGERS),
    NpuOperator(("PadV3",), run=_pad, trial=ANY_INTEGERS),
    NpuOperator(
        ("GatherV2",),
        acl=("aclnnEmbedding", "aclnnGather", "aclnnIndex", "aclnnIndexSelect"),
        run=_gather,
        types=type_rules.gather,
        work=work.indexed,
        trial=Trial(indices={"indices": gather_index}),
    ),
    NpuOperator(
        ("GatherElements",),
        run=_gather_elements,
        types=type_rules.indexed,
        work=work.indexed,
        trial=Trial(indices={"index": gather_index}),
    ),
    NpuOperator(
        ("Cmo",),
        torch=(TorchForm("npu.npu_prefetch.default", npu_prefetch, weights=((0, "input"),)),),
        run=_fetch,
        work=work.fetch,
        weight="src",
    ),
    NpuOperator(("Assign",), run=_assign, types=type_rules.same, writes={0: 0}, copies=2),
)
