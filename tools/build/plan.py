"""Turns what a user asked to build into a plan: model, buckets, sizes and memory, before anything is computed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...graphs import tree
from ...graphs.errors import SpecError
from ...graphs.types import Aval, Bucket, Limits, Mesh, Rules
from ...models import registry, sharding_rules, step
from ...models.variant import Variant
from . import plan_device
from .choices import DEFAULT_BUCKETS, DEFAULT_PREFILL
from .memory import local_bytes
from .targets import Target, check_mesh, target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_MODEL_LEN = 1024
DEVICE_MODEL_LEN = 4096
DEVICE_CHUNK = 2048
PAGE_SIZE = 16
MAX_LOGPROBS = 20
"""As many as OpenAI's API knows."""
CPU, ONE = target("cpu"), Mesh()


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
        backend: "inductor", "eager", "null" or "ge"; None is the target's.
        target: "cpu" or a kind of NPU node (tools/build/targets.py).
        mesh: as in "dp=8,tp=2".
        deployment, phase: a published deployment (tools/build/deployments.py), and which of its instances.
        quantization: scheme that parameters are held in (models/variant.py).
        num_speculative_tokens: k, drafts a decode step verifies.
        max_logprobs: of how many most likely tokens a request may ask the log probabilities.
    """

    model: str
    buckets: tuple[int, ...] | None = None
    prefill: tuple[int, ...] | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    dtype: str = "auto"
    backend: str | None = None
    target: str | None = None
    mesh: str | None = None
    deployment: str | None = None
    phase: str | None = None
    quantization: str | None = None
    num_speculative_tokens: int | None = None
    max_logprobs: int | None = None


@dataclass(frozen=True)
class Plan:
    """A build that is decided and checked.

    Attributes:
        found: the model, and its checkpoint where it has one.
        model: the same with the variant that the build holds it in.
        limits: of one dp group.
        notes: choices the plan made for the user, each with its reason.
        published: the limits are the deployment's own, not made of a context and a number of requests.
        max_logprobs: of how many most likely tokens the log probabilities are told; 0 tells none.
    """

    found: registry.Found
    model: step.Model
    buckets: tuple[Bucket, ...]
    limits: Limits
    dtype: torch.dtype
    backend: str
    notes: tuple[str, ...]
    target: Target = CPU
    mesh: Mesh = ONE
    quantization: str = "none"
    deployment: str = ""
    phase: str = "mixed"
    published: bool = False
    max_logprobs: int = 0

    @property
    def on_device(self) -> bool:
        """Whether it is for devices that this machine stands in for: nothing of it runs here."""
        return self.target.backend == "ge"

    def rules(self, bucket: Bucket | None = None) -> Rules:
        """Layout of a bucket's graph; that of parameters and state is the same for all."""
        tokens = bucket.tokens if bucket else self.mesh.axis("tp")
        return sharding_rules.rules(self.mesh, experts=getattr(self.model.config, "num_experts", 0), tokens=tokens)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Command line of `npucompile build` that decides the same."""
        decode = [bucket.batch for bucket in self.buckets if bucket.kind == "decode"]
        prefill = [bucket.q_len for bucket in self.buckets if bucket.kind == "prefill"]
        options = {
            "buckets": ",".join(map(str, decode)),
            "prefill": ",".join(map(str, prefill)),
            "max-model-len": "" if self.published else self.limits.max_model_len,
            "max-num-seqs": "" if self.published else self.limits.num_seats - 1,
            "dtype": dtype_name(self.dtype),
            "backend": self.backend,
        }
        if self.mesh.size > 1 or self.on_device:
            mesh = str(self.mesh) if self.mesh.axes else ""
            options |= {"target": self.target.name, "mesh": mesh, "quantization": self.quantization, "deployment": self.deployment}
            options |= {"phase": self.phase} if self.phase != "mixed" else {}
        options |= {"speculative-tokens": self.limits.drafts, "max-logprobs": self.max_logprobs}
        return (_asked(self.found), *(word for name, value in options.items() for word in (f"--{name}", str(value)) if str(value)))

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
        """Bytes of one device's parameters."""
        rules = self.rules()
        return sum(local_bytes(p.aval, self.mesh, rules) for _, p in tree.flatten(self.model.params(self.dtype)))

    @property
    def state_bytes(self) -> int:
        """Bytes of one device's state pools."""
        rules = self.rules()
        leaves: list[tuple[str, Aval]] = tree.flatten(self.model.state(self.limits, self.dtype))
        return sum(local_bytes(aval, self.mesh, rules) for _, aval in leaves)


def plan(options: Options) -> Plan:
    """Decides a build.

    Raises:
        SpecError: an option is not legal, or the weights and state do not fit this machine's memory.
        ModelError: the model cannot be used.
        PartitionError: the model does not spread over the mesh.
    """
    found = registry.find(options.model)
    device = None
    if options.backend in (None, "ge") or options.deployment or options.target:
        device = plan_device.decide(
            found.name,
            deployment=options.deployment,
            phase=options.phase,
            target_name=options.target,
            mesh=options.mesh,
            quantization=options.quantization,
            drafts=options.num_speculative_tokens,
            drafting=found.model.has_draft_head,
        )
    if options.phase and not (device and device.deployment):
        raise SpecError(f"--phase {options.phase} is one side of a deployment that splits them; name it, as in --deployment ID")
    made = _for_device(options, found, device) if device else _for_here(options, found)
    _check_spread(made)
    return made


def _for_here(options: Options, found: registry.Found) -> Plan:
    """A build that runs on this machine, in one process or in one a rank."""
    _refuse_for_here(options, found)
    notes = []
    dtype, why = choose_dtype(options.dtype)
    if why:
        notes.append(why)
    mesh = Mesh.parse(options.mesh or "")
    check_mesh(CPU, mesh)
    backend = options.backend or ("inductor" if mesh.size == 1 else "eager")
    if mesh.size > 1 and backend == "inductor":
        raise SpecError(f"--backend inductor with mesh {mesh}: ranks on this machine run uncompiled; legal are eager and null")
    length, why = _length(options, found)
    notes += [why] if why else []
    batches, sequences = _batches(DEFAULT_BUCKETS if options.buckets is None else options.buckets, options.max_num_seqs)
    chunks = DEFAULT_PREFILL if options.prefill is None else options.prefill
    prefill = _prefill(chunks, length)
    if dropped := sorted({chunk for chunk in chunks if chunk > length}):
        notes.append(f"no prefill of {', '.join(map(str, dropped))} tokens: longer than the context of {length}")
    drafts, why = _drafts(options, found)
    notes += [why] if why else []
    decode = tuple(Bucket("decode", batch, drafts + 1) for batch in batches)
    limits = Limits(PAGE_SIZE, 1 + sequences * (length // PAGE_SIZE), 1 + sequences * (drafts + 1), length, drafts + 1, drafts)
    scheme = options.quantization or "none"
    model = replace(_held(found.model, mesh, scheme, torch.float32), drafting=drafts > 0)
    told = _max_logprobs(options, found, MAX_LOGPROBS)
    made = Plan(found, model, (*prefill, *decode), limits, dtype, backend, tuple(notes), CPU, mesh, scheme, max_logprobs=told)
    _check_memory(made)
    if never := sorted(set(found.eos_ids) - set(made.eos_ids)):
        note = f"end-of-text ids {never} lie outside the vocabulary of {found.model.config.vocab_size} and end nothing"
        return replace(made, notes=(*made.notes, note))
    return made


def _drafts(options: Options, found: registry.Found) -> tuple[int, str | None]:
    """k of a build for this machine, and why when the plan chose it."""
    asked, has = options.num_speculative_tokens, found.model.has_draft_head
    if asked is None:
        chosen = plan_device.DEFAULT_DRAFTS if has else 0
        return chosen, f"each step drafts {chosen} tokens and verifies them in the next (--speculative-tokens to change)" if has else None
    if not 0 <= asked <= plan_device.MOST_DRAFTS:
        raise SpecError(f"speculative tokens is {asked}; legal are 0 to {plan_device.MOST_DRAFTS}")
    if asked and not has:
        raise SpecError(f"--speculative-tokens {asked}: {found.name} has no draft head (mtp_num_hidden_layers is 0); legal is 0")
    return asked, None


def _max_logprobs(options: Options, found: registry.Found, default: int) -> int:
    """Of how many most likely tokens log probabilities are told."""
    most = min(MAX_LOGPROBS, found.model.config.vocab_size)
    asked = min(default, most) if options.max_logprobs is None else options.max_logprobs
    if not 0 <= asked <= most:
        raise SpecError(f"max_logprobs is {asked}; legal for {found.name} are 0 to {most}")
    return int(asked)


def _refuse_for_here(options: Options, found: registry.Found) -> None:
    if options.backend == "ge":
        raise SpecError("--backend ge is for NPUs; name a --deployment, or a --target and a --mesh")
    if found.checkpoint_dir is None and options.backend != "null":
        raise SpecError(
            f"{found.name} is a set of sizes without weights, and --backend {options.backend or 'inductor'} runs them; "
            "legal here is --backend null (graphs, costs and memory only), a path to a checkpoint directory, or a build for NPUs "
            "(--target ascend-a3 --mesh tp=2, or a --deployment)"
        )


def _for_device(options: Options, found: registry.Found, device: plan_device.Device) -> Plan:
    """A build for NPUs; what it holds is checked against their memory once its graphs are known."""
    if options.backend not in (None, "ge", "null"):
        raise SpecError(f"--backend {options.backend} makes nothing that {device.target.name} runs; legal are ge and null")
    dtype = torch.bfloat16 if options.dtype == "auto" else choose_dtype(options.dtype)[0]
    if dtype != torch.bfloat16:
        raise SpecError(f"--dtype {options.dtype} for {device.target.name}: its fused operators take bfloat16; legal are auto and bfloat16")
    batches, limits, published = _device_limits(options, found, device)
    length = limits.max_model_len
    chunks = (DEVICE_CHUNK,) if device.prefill is None else device.prefill
    chunks = tuple(min(chunk, length) for chunk in chunks) if options.prefill is None else options.prefill
    prefill = _prefill(chunks, length) if chunks or options.prefill is not None else ()
    decode = tuple(Bucket("decode", batch, device.drafts + 1) for batch in batches)
    # The recurrent operator of the NPU takes no other state, whatever the model's file or a launch for another kernel says.
    model = replace(_held(found.model, device.mesh, device.quantization, torch.bfloat16), drafting=device.drafts > 0)
    if not device.target.dispatches:
        # Replaced, not refused: gathering moves more bytes and means the same.
        model = replace(model, config=replace(model.config, variant=replace(model.config.variant, most_dispatched=0)))
    notes = (f"deployment {device.deployment}, {device.phase}",) if device.deployment else ()
    place = (device.target, device.mesh, device.quantization, device.deployment, device.phase, published)
    # Off unless asked for: a device computes them for every row of every step, since no graph depends on who asks.
    told = _max_logprobs(options, found, 0)
    return Plan(found, model, (*prefill, *decode), limits, dtype, options.backend or device.target.backend, notes, *place, told)


def _device_limits(options: Options, found: registry.Found, device: plan_device.Device) -> tuple[list[int], Limits, bool]:
    """Decode batch sizes, none where nothing is decoded; limits; and whether those are the deployment's own."""
    page, held = device.target.page_size, device.limits
    longest = found.max_position_embeddings // page * page
    requests = held.num_seats - 1 if held else 0
    if device.phase == "prefill":
        batches: list[int] = []
        asked = options.max_num_seqs or requests
    else:
        sizes = device.buckets or DEFAULT_BUCKETS if options.buckets is None else options.buckets
        batches, asked = _batches(sizes, options.max_num_seqs)
    if held and options.max_model_len is None and options.max_num_seqs is None:
        requests = max(requests, asked)
        slots, pages = 1 + requests * held.slots_per_request, max(held.num_pages, 1 + requests)
        return batches, replace(held, num_pages=pages, num_slots=slots, max_model_len=min(held.max_model_len, longest)), True
    length = min(held.max_model_len if held else DEVICE_MODEL_LEN, longest) if options.max_model_len is None else options.max_model_len
    if not page <= length <= longest or length % page:
        raise SpecError(
            f"max_model_len is {length}; legal for {found.name} on {device.target.name} is a multiple of {page} up to {longest}"
        )
    slots = 1 if device.phase == "prefill" else device.drafts + 1
    return batches, Limits(page, 1 + asked * (length // page), 1 + asked * slots, length, slots, device.drafts), False


def _held(model: step.Model, mesh: Mesh, scheme: str, state_dtype: torch.dtype) -> step.Model:
    """The model as a build on that mesh holds it: more ranks of a group than key-value heads each hold a copy of one."""
    config = model.config
    group, heads = mesh.axis("tp"), config.num_key_value_heads
    for name in ("num_attention_heads", "linear_num_key_heads"):
        if (count := getattr(config, name, group)) % group:
            raise SpecError(f"mesh {mesh}: {group} ranks of a group cannot share {name} {count}; legal are divisors of {count}")
    if max(group, heads) % min(group, heads):
        raise SpecError(f"mesh {mesh}: {group} ranks of a group share {heads} key-value heads; legal are multiples or divisors of {heads}")
    grouped = mesh.size > 1 and getattr(config, "num_experts", 0) > 0
    variant = Variant.of(scheme, grouped=grouped, kv_repeat=max(1, group // heads), recurrent=state_dtype)
    return replace(model, config=replace(config, variant=variant))


def _check_spread(made: Plan) -> None:
    """Refuses, before anything is traced, a model whose parameters or pools do not divide."""
    rules = made.rules()
    params = [(name, param.aval) for name, param in tree.flatten(made.model.params(made.dtype))]
    for name, aval in (*params, *tree.flatten(made.model.state(made.limits, made.dtype))):
        rules.check(aval, made.mesh, name)


def _length(options: Options, found: registry.Found) -> tuple[int, str | None]:
    """Most tokens of a request, and why when the plan chose it."""
    longest = found.max_position_embeddings
    length = min(DEFAULT_MODEL_LEN, longest // PAGE_SIZE * PAGE_SIZE) if options.max_model_len is None else options.max_model_len
    if not PAGE_SIZE <= length <= longest or length % PAGE_SIZE:
        raise SpecError(f"max_model_len is {length}; legal for {found.name} is a multiple of {PAGE_SIZE} up to {longest}")
    chosen = options.max_model_len is None and length < longest
    return length, f"context {length} of {longest} tokens (state is allocated for all of it; --max-model-len to change)" if chosen else None


def _prefill(chunks: tuple[int, ...], length: int) -> tuple[Bucket, ...]:
    found = tuple(Bucket("prefill", 1, chunk) for chunk in sorted(set(chunks)) if chunk <= length)
    if not found:
        raise SpecError(f"no prefill chunk of {chunks} fits max_model_len {length}; legal are sizes from 1 to {length}")
    return found


def _batches(sizes: tuple[int, ...], most: int | None) -> tuple[list[int], int]:
    """Decode batch sizes, and requests in flight.

    Raises:
        SpecError: there are no sizes, or one that can never be filled.
    """
    batches = sorted(set(sizes))
    if not batches:
        raise SpecError("no decode buckets; legal is at least one batch size, as in --buckets 1,2,4")
    sequences = batches[-1] if most is None else most
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
