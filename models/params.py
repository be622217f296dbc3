"""Declarations of parameters: abstract value, random initialisation, and where a checkpoint has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..graphs import tree
from ..graphs.types import Aval, Tree


def _single(*tensors: torch.Tensor) -> torch.Tensor:
    (tensor,) = tensors
    return tensor


def _alone(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (tensor,)


NUMBERS = ("F32", "BF16", "F16", "F64")
"""Dtypes of a file that are numbers as they stand."""


@dataclass(frozen=True)
class Parts:
    """A dimension that consists of parts, one behind the other, each of which is split over the ranks by itself.

    Attributes:
        axis: logical axis of every part.
        sizes: sizes of the parts; their sum is the size of the dimension.
    """

    axis: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Picked:
    """A join that is one result of a function that makes several parameters of the same tensors, such as a weight and its scale.

    Who reads these parameters together calls `together` once for all of them.

    Attributes:
        index: of the result.
    """

    together: Callable[..., tuple[torch.Tensor, ...]]
    index: int

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.together(*tensors)[self.index]


@dataclass(frozen=True)
class Repeated:
    """A dimension of elements of which the parameter has adjacent copies, so that ranks can share an element.

    A rank reads the elements that its slice of the parameter has copies of; `Source.join` repeats them as often as the slice needs.

    Attributes:
        axis: logical axis of the copies.
        elements: how many elements the dimension consists of, one behind the other.
        copies: of each element.
    """

    axis: str
    elements: int
    copies: int


@dataclass(frozen=True)
class Padded:
    """A dimension of which the parameter has more elements, zeros at its end, so that ranks share it evenly (padding.py).

    A rank reads those of its slice that are there; `Source.join` adds the zeros.

    Attributes:
        axis: logical axis of the dimension.
        padded: its size in the parameter.
    """

    axis: str
    padded: int


@dataclass(frozen=True)
class Members:
    """A dimension of heads of one kind, one behind the other, that ranks share along the axis of another kind, or read whole.

    Attributes:
        axis: logical axis along which they share it; None: a rank reads it whole.
        kind: logical axis of the heads themselves.
        copies: adjacent ones that the parameter has of each.
    """

    axis: str | None
    kind: str
    copies: int = 1


@dataclass(frozen=True)
class Placed:
    """A dimension of heads of which the parameter has more, some of zeros, so that ranks share them evenly (head_padding.py).

    A rank reads the heads of its slice that are there; `Source.join` puts them in their places.

    Attributes:
        axis: logical axis along which ranks share it; None: a rank reads it whole.
        real: how many heads the dimension has.
        places: for each head of the parameter which of the dimension's it is, in increasing order; -1 for one of zeros.
        ranks: that share them.
        copies: adjacent ones that the parameter has of each.
        units: relative widths of a head in the parts, one behind the other, that the dimension consists of.
    """

    axis: str | None
    real: int
    places: tuple[int, ...]
    ranks: int
    copies: int = 1
    units: tuple[int, ...] = (1,)

    @property
    def share(self) -> int:
        """Places of a rank."""
        return -(-len(self.places) // self.ranks)


EXPERTS = "experts"
"""The logical axis of experts."""


@dataclass(frozen=True)
class Physical:
    """A dimension of experts, of which the parameter has some in other places and more than once (expert_placement.py).

    A rank reads those of its slice, in its order; `Source.join` is given them as they are.

    Attributes:
        logical: for each place of the parameter which of the dimension's experts it is.
    """

    logical: tuple[int, ...]

    @property
    def axis(self) -> str:
        """Logical axis of the dimension."""
        return EXPERTS


SourceAxis = str | Parts | Repeated | Padded | Members | Placed | Physical | None


def axis_name(axis: SourceAxis) -> str | None:
    """The logical axis of a dimension of a source tensor."""
    return axis if axis is None or isinstance(axis, str) else axis.axis


@dataclass(frozen=True)
class Source:
    """The tensors of a Hugging Face checkpoint that a parameter is made from.

    Attributes:
        names: the tensors; none where `join` makes the parameter of nothing.
        shapes: their shapes on disk.
        join: those tensors -> the parameter.
        split: the parameter -> those tensors; the inverse of join.
        axes: for each tensor the logical axis of each dimension, where `join` of a rank's slices along these axes is the rank's slice of
            the parameter: a rank need not read the rest. A dimension with None is read whole.
        unread: tensors of a checkpoint that belong to these and that the model deliberately does not read, by name, or by a prefix that
            ends in a dot: of a part of which nothing is read.
        unread_mark: a tensor that tells such a part from another one under the same prefix, as a draft head from a layer too many.
        block_axis: an axis that is dimension 0 of every tensor, where element i of the parameter along it is made from elements i of the
            tensors alone: a large parameter is read and joined in blocks along it.
        padded_from: the source of all heads, of which this one's checkpoint has some (head_padding.py): its join tells what goes where.
        uncalibrated: whether `join` makes up the scale of activations that a calibration would find: for rehearsals on random weights.
        dtypes: for each tensor the legal dtypes on disk, by their codes in a file; empty: all are floats.
        instead: the tensors that are read where a checkpoint has none of `names`: a head may share the embedding's.
        first_rows: whether the tensors have more rows on disk, which other parameters are made from: they are never written.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    join: Callable[..., torch.Tensor] = _single
    split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = _alone
    axes: tuple[tuple[SourceAxis, ...], ...] | None = None
    block_axis: str | None = None
    unread: tuple[str, ...] = ()
    unread_mark: str = ""
    dtypes: tuple[tuple[str, ...], ...] = ()
    uncalibrated: bool = False
    padded_from: Source | None = None
    instead: tuple[str, ...] = ()
    first_rows: bool = False

    def legal_dtypes(self, index: int) -> tuple[str, ...]:
        """Legal dtypes of a tensor on disk, by their codes in a file."""
        return self.dtypes[index] if self.dtypes else NUMBERS


@dataclass(frozen=True)
class Param:
    """One parameter before it exists.

    Attributes:
        aval: shape, dtype and logical axes.
        source: the tensors of a checkpoint it is made from.
        init: "normal" (standard deviation 1 / sqrt(last dimension)), "embedding" (0.02), "zeros", "ones", "count" (0, 1, 2,
            ...), "cache_scale" (CACHE_SCALE), or "quantised", which is never drawn.
        role: of a matrix that may be stored in another format (models/quant): "column", [..., K] whose contraction no layout splits;
            "row", [N, K] whose contraction is split where its axis is; "experts" and "experts_down", the same with a dimension of experts
            in front; "norm", a norm's weight. "" for all else.
        biased: whether the checkpoint has a bias beside it that is added to the product: then the weight is a mapping of `weight`, [N, K],
            and `bias`, [N]. Legal for roles "column" and "norm".
    """

    aval: Aval
    source: Source
    init: str = "normal"
    role: str = ""
    biased: bool = False

    @property
    def is_source(self) -> bool:
        """Whether the parameter is its source tensor as it stands."""
        return self.source.join is _single and self.source.shapes == (self.aval.shape,)

    @property
    def source_axes(self) -> tuple[tuple[SourceAxis, ...], ...]:
        """Logical axes of the source tensors: those that `Source.axes` declares, and the parameter's own where it is its source tensor."""
        if self.source.axes is not None:
            return self.source.axes
        return (self.aval.axes,) if self.is_source else tuple((None,) * len(shape) for shape in self.source.shapes)

    @property
    def logical(self) -> tuple[int, ...] | None:
        """The logical expert of each physical one; None where it has none in other places."""
        return next((axis.logical for axes in self.source_axes for axis in axes if isinstance(axis, Physical)), None)

    def whole(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The parameter, from the whole tensors of its source."""
        return self.source.join(*map(_in_places, tensors, self.source_axes))


def _in_places(tensor: torch.Tensor, axes: tuple[SourceAxis, ...]) -> torch.Tensor:
    """A whole tensor of a source with its experts in the places of the parameter's."""
    for dim, axis in enumerate(axes):
        if isinstance(axis, Physical):
            tensor = tensor.index_select(dim, torch.tensor(axis.logical))
    return tensor


def norm_init(offset: float) -> str:
    """`Param.init` of a norm's weight to which `offset` is added: the norm begins without scaling."""
    return "zeros" if offset else "ones"


def norm(name: str, width: int, dtype: torch.dtype, offset: float) -> Param:
    """The weight [width] of a norm; `name` is its module's in a checkpoint."""
    return Param(Aval((width,), dtype), Source((name + ".weight",), ((width,),)), norm_init(offset), role="norm")


def avals(params: Tree) -> Tree:
    """Tree of Param -> tree of their abstract values."""
    return tree.map_leaves(lambda p: p.aval, params)


CACHE_SCALE = 4 / 127
"""Drawn scale of a cached channel: normalised keys and values are seldom above four."""


def initialise(params: Tree, generator: torch.Generator) -> Tree:
    """Random tensors for a tree of Param, in declaration order from one generator.

    Args:
        params: tree of Param.
        generator: CPU generator; its state advances.
    """

    def each(param: Param) -> torch.Tensor:
        if not param.source.names:
            return param.source.join()
        if (logical := param.logical) is None:
            return draw(param, param.aval.shape)
        # Copies of an expert are equal, and all experts are those that are drawn where none is placed.
        shape, dim = param.aval.shape, param.aval.axes.index(EXPERTS)
        return draw(param, (*shape[:dim], max(logical) + 1, *shape[dim + 1 :])).index_select(dim, torch.tensor(logical))

    def draw(param: Param, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = param.aval.dtype
        if param.init in ("zeros", "ones"):
            return torch.full(shape, float(param.init == "ones"), dtype=dtype)
        if param.init == "cache_scale":
            return torch.full(shape, CACHE_SCALE, dtype=dtype)
        if param.init == "count":
            return torch.arange(shape[0], dtype=dtype)
        std = 0.02 if param.init == "embedding" else shape[-1] ** -0.5
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    return tree.map_leaves(each, params)
