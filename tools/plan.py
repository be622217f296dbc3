"""Turns what a user asked to build into a plan: model, buckets, sizes and memory, before anything is computed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..graphs import tree
from ..graphs.errors import SpecError
from ..graphs.types import Aval, Bucket, Limits
from ..models import registry, step

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_BUCKETS = (1, 2, 4, 8, 16)
DEFAULT_PREFILL = (32, 128)
DEFAULT_MODEL_LEN = 1024
PAGE_SIZE = 16


@dataclass(frozen=True)
class Options:
    """What `npucompile build` was asked for; None leaves a choice to the plan.

    Attributes:
        model: preset name or checkpoint directory.
        buckets: decode batch sizes.
        prefill: prefill chunk sizes, in tokens.
        max_model_len: most tokens (prompt and output) of a request.
        max_num_seqs: most requests in flight.
        dtype: "auto", "float32" or "bfloat16".
        backend: "inductor", "eager" or "null".
    """

    model: str
    buckets: tuple[int, ...] = DEFAULT_BUCKETS
    prefill: tuple[int, ...] = DEFAULT_PREFILL
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    dtype: str = "auto"
    backend: str = "inductor"


@dataclass(frozen=True)
class Plan:
    """A build that is decided and checked.

    Attributes:
        found: the model, and its checkpoint where it has one.
        notes: choices the plan made for the user, each with its reason.
    """

    found: registry.Found
    model: step.Model
    buckets: tuple[Bucket, ...]
    limits: Limits
    dtype: torch.dtype
    backend: str
    notes: tuple[str, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Command line of `npucompile build` that decides the same."""
        decode = [bucket.batch for bucket in self.buckets if bucket.kind == "decode"]
        prefill = [bucket.q_len for bucket in self.buckets if bucket.kind == "prefill"]
        options = {
            "buckets": ",".join(map(str, decode)),
            "prefill": ",".join(map(str, prefill)),
            "max-model-len": self.limits.max_model_len,
            "max-num-seqs": (self.limits.num_slots - 1) // self.limits.slots_per_request,
            "dtype": dtype_name(self.dtype),
            "backend": self.backend,
        }
        return (_asked(self.found), *(word for name, value in options.items() for word in (f"--{name}", str(value))))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer; one outside the vocabulary can never be generated."""
        return tuple(token for token in self.found.eos_ids if token < self.model.config.vocab_size)

    @property
    def references(self) -> tuple[Bucket, ...]:
        """Buckets of one row that are not served, and that rows of larger buckets are compared with."""
        singles = {Bucket(b.kind, 1, b.q_len) for b in self.buckets}
        return tuple(sorted(singles - set(self.buckets)))

    @property
    def params_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(p.aval.nbytes for _, p in tree.flatten(self.model.params(self.dtype)))

    @property
    def state_bytes(self) -> int:
        """Bytes of all state pools."""
        leaves: list[tuple[str, Aval]] = tree.flatten(self.model.state(self.limits, self.dtype))
        return sum(aval.nbytes for _, aval in leaves)


def plan(options: Options) -> Plan:
    """Decides a build.

    Raises:
        SpecError: an option is not legal, or the weights and state do not fit this machine's memory.
        ModelError: the model cannot be used.
    """
    found = registry.find(options.model)
    notes = []
    dtype, why = choose_dtype(options.dtype)
    if why:
        notes.append(why)
    backend = options.backend
    if found.checkpoint_dir is None and backend != "null":
        raise SpecError(
            f"{found.name} is a set of sizes without weights, and --backend {backend} runs them; "
            "legal here is --backend null (graphs, costs and memory only), or a path to a checkpoint directory"
        )
    longest = found.max_position_embeddings
    length = min(DEFAULT_MODEL_LEN, longest // PAGE_SIZE * PAGE_SIZE) if options.max_model_len is None else options.max_model_len
    if not PAGE_SIZE <= length <= longest or length % PAGE_SIZE:
        raise SpecError(f"max_model_len is {length}; legal for {found.name} is a multiple of {PAGE_SIZE} up to {longest}")
    if options.max_model_len is None and length < longest:
        notes.append(f"context {length} of {longest} tokens (state is allocated for all of it; --max-model-len to change)")
    batches, sequences = _batches(options)
    prefill = tuple(Bucket("prefill", 1, chunk) for chunk in sorted(set(options.prefill)) if chunk <= length)
    if not prefill:
        raise SpecError(f"no prefill chunk of {options.prefill} fits max_model_len {length}; legal are sizes from 1 to {length}")
    if dropped := sorted({chunk for chunk in options.prefill if chunk > length}):
        notes.append(f"no prefill of {', '.join(map(str, dropped))} tokens: longer than the context of {length}")
    decode = tuple(Bucket("decode", batch, 1) for batch in batches)
    limits = Limits(PAGE_SIZE, 1 + sequences * (length // PAGE_SIZE), 1 + sequences, length)
    made = Plan(found, found.model, (*prefill, *decode), limits, dtype, backend, tuple(notes))
    _check_memory(made)
    if never := sorted(set(found.eos_ids) - set(made.eos_ids)):
        note = f"end-of-text ids {never} lie outside the vocabulary of {found.model.config.vocab_size} and end nothing"
        return replace(made, notes=(*made.notes, note))
    return made


def _batches(options: Options) -> tuple[list[int], int]:
    """Decode batch sizes, and requests in flight.

    Raises:
        SpecError: there are no sizes, or one that can never be filled.
    """
    batches = sorted(set(options.buckets))
    if not batches:
        raise SpecError("no decode buckets; legal is at least one batch size, as in --buckets 1,2,4")
    sequences = batches[-1] if options.max_num_seqs is None else options.max_num_seqs
    if sequences < batches[-1]:
        raise SpecError(f"max_num_seqs is {sequences} and the largest bucket has {batches[-1]} rows; legal is at least that many")
    return batches, sequences


def _check_memory(made: Plan) -> None:
    """Refuses what this machine cannot hold; a plan without an executor may be of any size."""
    needed, held = made.params_bytes + made.state_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if made.backend != "null" and needed > held:
        raise SpecError(
            f"{made.found.name} needs {made.params_bytes / 1e9:,.1f} GB for weights and {made.state_bytes / 1e9:,.1f} GB for state, this "
            f"machine has {held / 1e9:,.1f} GB; smaller are --max-model-len, --max-num-seqs and --buckets, and --backend null needs none"
        )


def _asked(found: registry.Found) -> str:
    """What `registry.find` finds this by, from any working directory."""
    if found.name in registry.presets() and registry.find(found.name).checkpoint_dir == found.checkpoint_dir:
        return found.name
    return str(Path(found.checkpoint_dir or found.name).resolve())


def choose_dtype(asked: str) -> tuple[torch.dtype, str | None]:
    """The dtype to compute in, and why when the plan chose it."""
    if asked != "auto":
        if asked not in DTYPES:
            raise SpecError(f"dtype is {asked!r}; legal are {', '.join(('auto', *DTYPES))}")
        return DTYPES[asked], None
    if torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16, "dtype bfloat16: this CPU multiplies it in hardware (--dtype to change)"
    return torch.float32, "dtype float32: this CPU has no bfloat16 arithmetic (--dtype to change)"


def dtype_name(dtype: torch.dtype) -> str:
    """The name `--dtype` knows a dtype by."""
    return next(name for name, kind in DTYPES.items() if kind == dtype)


def default_out(artifacts: Path, found: registry.Found) -> Path:
    """Where a build goes when nothing else is said."""
    return artifacts / found.name
