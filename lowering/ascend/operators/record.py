"""The record of an NPU operator: all that is known of it, in GE's form and in torch's, so that an operator is one entry of one file.

A field that an operator leaves out has the plain answer: it reads its inputs, writes new results, and exchanges nothing. Where there is
no plain answer (a CPU kernel, the type of an undeclared result) who needs the field refuses the operator by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .call import Function, GroupFunction
from .node import LegalityRule
from .trials import PLAIN, Trial
from .type_rules import Rule
from .value_rules import Index, ValueRule
from .work import AS_MOST, KernelTime, Rows, Stages, WorkRule

Kernel = Callable[..., Any]
"""CPU kernel of a torch operator of one rank: called with the arguments of its node."""
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments of one member's call."""
Converter = Callable[[Any, Any], Callable[..., Any]]
"""torchair (harness.Torchair), and its own converter of an overload or None -> the converter that takes its place."""
GroupKernel = Callable[..., list[Any]]
"""CPU kernel of a collective: `Arguments` of all members in rank order, and perhaps the members wanted -> their results, or all."""


@dataclass(frozen=True)
class TorchForm:
    """An overload of torch that runs the operator.

    Attributes:
        name: of the overload, as `npu.npu_rms_norm.default`.
        kernel: on one rank; takes CPU tensors, raises LoweringError for arguments that it does not implement, fills rows that the
            documentation calls undefined with NaN (integers: the lowest value), and also takes float32 where the device has bfloat16 only.
        group_kernel: of all members, where it communicates.
        group: position and name of the argument that has the group.
        size: position of the number of members; None where the operator does not name it.
        rank: position of the rank's number in its group, which is 0 in a file and each rank's own when it is opened; None as above.
        weights: position and name of the inputs that a captured graph may have in NZ.
        only_nz: dtype of weights that it takes in NZ alone.
        takes_transposed: a transposed view of a matrix is read as it lies; others copy it first.
        host_lists: arguments that hold integers for the tiling, which the host computes: SymInt[] in torch_npu's schema.
        in_place: overload that takes the same arguments and writes new pools into the old ones; "" where there is none.
        pools: result -> position of the argument that it replaces, of a form that has `in_place`.
        one_result: whether `in_place` returns one tensor, where this form returns several.
        values: ranges of its results; None where nothing is known but what their dtypes say.
        index: the operand that names places of a table.
    """

    name: str
    kernel: Kernel | None = None
    group_kernel: GroupKernel | None = None
    group: tuple[int, str] | None = None
    size: int | None = None
    rank: int | None = None
    weights: tuple[tuple[int, str], ...] = ()
    only_nz: torch.dtype | None = None
    takes_transposed: bool = False
    host_lists: tuple[str, ...] = ()
    in_place: str = ""
    pools: Mapping[int, int] = field(default_factory=dict)
    one_result: bool = False
    values: ValueRule | None = None
    index: Index | None = None


SUMS, COUNTS = 0, 1
"""Kinds of a list of tokens of each expert: running sums, or one count each."""


@dataclass(frozen=True)
class TokenList:
    """A list of tokens of each expert.

    Attributes:
        operand: number of the result, or name of the input.
        attribute: says which of `SUMS` and `COUNTS` it has; "" where nothing does.
        default: kind where the attribute is absent.
    """

    operand: int | str
    attribute: str
    default: int


@dataclass(frozen=True)
class NpuOperator:
    """One operator.

    Attributes:
        ge: its types in GE graphs; several where versions have the same meaning.
        acl: functions of CANN that run it outside GE, where they have names of their own.
        torch: its overloads.
        converters: overload of torch -> its converter to GE, where torchair has none or writes what CANN's definitions do not ask for.
        run: computes a GE operator on one rank; those that write in place return what they write.
        run_group: computes a GE operator on all members of a group.
        widens: its kernel returns float32 for float32, where GE declares bfloat16.
        types: dtype and sizes of results that conversion leaves undeclared.
        keeps_format: results are in the format of the first input, or in the one that attribute `dst_format` names.
        work: what it reads, writes, computes and sends; None: its operands and results once (`work.generic`).
        stages: the same for an operator that computes and communicates one after the other.
        time: what its kernel takes beside its work.
        routed: rows by expert of the group list that it gives, for the number of ranks.
        writes: result -> input whose memory it overwrites.
        view: its result may share the memory of its first input.
        copies: number of inputs that it reads whole and writes elsewhere; 0 where it is no copy.
        casts: attribute with the dtype that it changes its input to; "" where it keeps it or computes.
        lengths: positions of inputs that are lengths of the step, and never constants.
        weight: name of the input that it takes in NZ; inputs of a list are numbered.
        only_nz: whether an operator message takes int8 weights in NZ alone.
        collective: name of the same exchange in partitioned graphs; "" where it does not communicate.
        own_group: the group that it has for itself on NPUs; "" where it shares one with other collectives.
        all_cores: its kernel waits until all cores are free, which a kernel of another rank that waits for this one may hold.
        exchange: what it exchanges in `own_group`, for messages.
        trial: how a bring-up runs it alone.
        gives_tokens, takes_tokens: the result and the input that list tokens of each expert.
        rules: checks of it alone, which facts name.
    """

    ge: tuple[str, ...] = ()
    acl: tuple[str, ...] = ()
    torch: tuple[TorchForm, ...] = ()
    converters: Mapping[str, Converter] = field(default_factory=dict)
    run: Function | None = None
    run_group: GroupFunction | None = None
    widens: bool = False
    types: Rule | None = None
    keeps_format: bool = False
    work: WorkRule | None = None
    stages: Stages | None = None
    time: KernelTime = AS_MOST
    routed: Callable[[Any, Mapping[str, Any], int], Rows] | None = None
    writes: Mapping[int, int] = field(default_factory=dict)
    view: bool = False
    copies: int = 0
    casts: str = ""
    lengths: tuple[int, ...] = ()
    weight: str = ""
    only_nz: Callable[[Any], bool] | None = None
    collective: str = ""
    own_group: str = ""
    all_cores: bool = False
    exchange: str = ""
    trial: Trial = PLAIN
    gives_tokens: TokenList | None = None
    takes_tokens: TokenList | None = None
    rules: tuple[LegalityRule, ...] = ()
