"""How a function is called: its name, the avals it was traced for, and the tree that it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...graphs import tree
from ...graphs.errors import SpecError, VerifyError
from ...graphs.types import COORDS, Aval, Function, Leaf, Mesh, Program, Rules, Tree


@dataclass(frozen=True)
class FunctionCall:
    """A function and what it is called with.

    Attributes:
        avals: trees of avals by argument.
        returned: structure of the result and which output each of its leaves is, known once the function was traced.
    """

    name: str
    function: Callable[..., Tree]
    avals: Mapping[str, Tree]
    returned: list[Any] = field(default_factory=list, compare=False)

    @staticmethod
    def of(function: Callable[..., Tree], avals: Sequence[Tree]) -> FunctionCall:
        """A call with trees of avals, or of tensors, of which shape and dtype count.

        Raises:
            SpecError: it is no function of so many arguments, or a leaf is no aval.
        """
        name = getattr(function, "__name__", type(function).__name__)
        if not callable(function):
            raise SpecError(f"{name} {function!r} is not callable; legal is a function of trees of tensors")
        try:
            arguments: dict[str, Tree] = inspect.signature(function).bind(*avals).arguments
        except TypeError as error:
            raise SpecError(f"{name} cannot be called with {len(avals)} positional arguments: {error}") from None
        except ValueError:
            arguments = {}
        if len(arguments) != len(avals) or COORDS in arguments:
            arguments = {f"arg{number}": aval for number, aval in enumerate(avals)}
        return FunctionCall(name, function, {argument: _avals(name, argument, value) for argument, value in arguments.items()})

    def program(self) -> Program:
        """The call as a program whose operands are all inputs."""

        def forward(params: Tree, state: Tree, inputs: Tree) -> tuple[Tree, Tree]:
            result = self.function(*inputs.values())
            leaves = tree.flatten(result)
            # A tensor that is returned twice is one output.
            different = {id(leaf): (path, leaf) for path, leaf in reversed(leaves)}
            places = {key: place for place, key in enumerate(different)}
            self.returned[:] = [pytree.tree_structure(result), [places[id(leaf)] for _, leaf in leaves]]
            return dict(different.values()), state

        return Program(self.name, Function(self.name), forward, {}, {}, dict(self.avals))

    def operands(self, arguments: Sequence[Tree]) -> list[torch.Tensor]:
        """The tensors of arguments, in the order of operands.

        Raises:
            SpecError: an argument has another structure, or a tensor another shape, dtype or device, than what was traced.
        """
        if len(arguments) != len(self.avals):
            raise SpecError(f"{self.name} is called with {len(arguments)} arguments; it was traced for {', '.join(self.avals) or 'none'}")
        operands: list[torch.Tensor] = []
        for (argument, avals), value in zip(self.avals.items(), arguments, strict=True):
            given, traced = tree.flatten(value), tree.flatten(avals)
            if pytree.tree_structure(value) != pytree.tree_structure(avals):
                shown = [", ".join(path or "a leaf" for path, _ in leaves) or "no leaves" for leaves in (given, traced)]
                raise SpecError(f"{self.name}: {argument} has {shown[0]}; it was traced as {shown[1]}, in trees of the same kinds")
            for (path, tensor), (_, aval) in zip(given, traced, strict=True):
                operands.append(_operand(f"{self.name}: {_joined(argument, path)}", tensor, aval))
        return operands

    def result(self, values: Sequence[torch.Tensor]) -> Tree:
        """The tree that the function returns, of these tensors."""
        structure, places = self.returned
        return pytree.tree_unflatten([values[place] for place in places], structure)


def shares(operands: Sequence[torch.Tensor], leaves: Sequence[Aval], mesh: Mesh, rules: Rules) -> list[list[torch.Tensor]]:
    """The operands of each rank: its part of each, then its coordinates where there are several ranks."""
    coords = [[mesh.coords(rank)] if mesh.size > 1 else [] for rank in range(mesh.size)]
    return [
        [*(value[rules.local_slice(aval, mesh, rank)].contiguous() for value, aval in zip(operands, leaves, strict=True)), *coords[rank]]
        for rank in range(mesh.size)
    ]


def whole(leaf: Leaf, parts: Sequence[torch.Tensor], mesh: Mesh, rules: Rules) -> torch.Tensor:
    """A value of which each rank has a part.

    Raises:
        VerifyError: ranks that have the same part have other values.
    """
    sizes = zip(leaf.aval.shape, leaf.aval.axes, strict=True)
    aval = Aval(tuple(size * rules.num_shards(axis, mesh) for size, axis in sizes), leaf.aval.dtype, leaf.aval.axes)
    value = torch.empty(aval.shape, dtype=aval.dtype)
    for rank, part in enumerate(parts):
        value[rules.local_slice(aval, mesh, rank)] = part
    for rank, part in enumerate(parts):
        if not torch.equal(torch.nan_to_num(value[rules.local_slice(aval, mesh, rank)]), torch.nan_to_num(part)):
            raise VerifyError(f"{leaf.name}: rank {rank} of mesh {mesh} has other values than a rank of the same part; legal is none")
    return value


def _joined(argument: str, path: str) -> str:
    return f"{argument}.{path}" if path else argument


def _avals(name: str, argument: str, value: Tree) -> Tree:
    """A tree of avals."""

    def aval(path: str, leaf: object) -> Aval:
        what = f"{name}: {_joined(argument, path)}"
        if isinstance(leaf, torch.Tensor):
            return Aval(tuple(leaf.shape), leaf.dtype)
        if not isinstance(leaf, Aval):
            raise SpecError(
                f"{what} is {leaf!r}; legal is an Aval(shape, dtype, axes) or a tensor; bind other values with functools.partial"
            )
        if not isinstance(leaf.dtype, torch.dtype):
            raise SpecError(f"{what} has dtype {leaf.dtype!r}; legal is a torch.dtype, as torch.float32")
        return Aval(tuple(leaf.shape), leaf.dtype, tuple(leaf.axes))

    return tree.unflatten(value, [aval(path, leaf) for path, leaf in tree.flatten(value)])


def _operand(what: str, value: object, aval: Aval) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise SpecError(f"{what} is {value!r}; legal is a tensor, {aval}")
    if (tuple(value.shape), value.dtype) != (aval.shape, aval.dtype):
        raise SpecError(f"{what} is {Aval(tuple(value.shape), value.dtype)}; it was traced as {aval}")
    if value.device.type != "cpu":
        raise SpecError(f"{what} is on {value.device}; legal is a tensor of the CPU")
    return value.detach().contiguous()
