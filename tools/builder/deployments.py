"""The table of published deployments, and the mesh, buckets and limits that each gives a build."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ...graphs.errors import SpecError
from ...graphs.sizes import Limits, Mesh
from ...models.presets import PRESETS
from ..notation import PrefillSize, parse_buckets

DEFAULT = {"qwen3.5-397b": "qwen35-397b-a3x8-in3k5-out1k5-50ms"}
"""The deployment a model is built for when neither deployment, target nor mesh is given."""

MAX_CHUNK = 16_384
"""Most tokens of a prefill chunk: the longest that is published for one prompt."""

UNCHUNKED = 4096
"""Most tokens of a prefill chunk where none is published; see `prefill_chunk`."""

POOL_TOKENS = 2**19
"""Most cached tokens of a group where the published engine takes all memory that is left; see `limits_for`."""

_CHUNK_MULTIPLE = 128


@dataclass(frozen=True)
class Phase:
    """One kind of instance of a deployment: "mixed", or "prefill" or "decode" where the deployment disaggregates them.

    Attributes:
        mesh: dp groups of tp ranks, of one instance. SGLang publishes the world size as its tp; here tp is that of one group, for both
            engines.
        ep: ranks that share one set of experts; 1 where experts are not spread.
        nodes: servers of one instance.
        instances: how many of them run.
        max_running_requests: most requests in flight in one instance, all groups together.
        buckets: decode batch sizes of one group; empty for an instance that only prefills.
        num_speculative_tokens: k, drafts per decode step.
        max_total_tokens: published cap of cached tokens of one group.
        context_len: published most tokens of one request.
        chunk_len: published most tokens of a prefill chunk, as `group_chunk` reads it; None where prompts are not chunked.
        mem_fraction: published share of memory for weights and pools.
        context_parallel: whether the ranks of a group share a prompt's tokens.
    """

    name: str
    mesh: Mesh
    ep: int
    nodes: int
    instances: int
    max_running_requests: int
    buckets: tuple[int, ...]
    num_speculative_tokens: int
    max_total_tokens: int | None = None
    context_len: int | None = None
    chunk_len: int | None = None
    mem_fraction: float | None = None
    context_parallel: bool = False

    @property
    def group_requests(self) -> int:
        """Most requests of one dp group; at least the batch size of its largest bucket."""
        return max(-(-self.max_running_requests // self.mesh.axis("dp")), *self.buckets, 1)


@dataclass(frozen=True)
class Deployment:
    """One row of the public guides.

    Attributes:
        id: what `--deployment` calls it.
        model: name of the model, the preset's if there is one.
        engine: "sglang" or "vllm-ascend", whose guide published it.
        target: name of its target.
        quantization: of the weights and activations of linear layers: "w4a8", "w8a8" or "bf16"; the guides do not
            say which layers keep more bits.
        draft_quantization: of the draft model; None if not stated.
        state_dtype: of recurrent states, "bfloat16" or "float32"; None for models without any.
        kv_cache_dtype: of what its launch caches, as `--kv-cache-dtype` has it; None where that is the computing type or the checkpoint's.
        phases: by name, "mixed" alone or "prefill" and "decode"; empty where no launch command is published.
        input_len, output_len: tokens per request of the published workload.
        prefix_hit_rate: share of the prompt found in the prefix cache.
        tpot_target_ms: the published target for the time per output token.
        concurrency: requests in flight during the published measurement, all groups together.
        measured: published results: tpot_ms, accept_length, output_tokens_per_s, concurrency.
        source: the guide.
        note: what this table decided where the guide leaves it open.
        pictures: whether its launch turns multimodal input on; it names no sizes.
    """

    id: str
    model: str
    engine: str
    target: str
    quantization: str
    source: str
    phases: Mapping[str, Phase] = field(hash=False)
    draft_quantization: str | None = None
    state_dtype: str | None = None
    kv_cache_dtype: str | None = None
    input_len: int | None = None
    output_len: int | None = None
    prefix_hit_rate: float | None = None
    tpot_target_ms: float | None = None
    concurrency: int | None = None
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)
    note: str | None = None
    pictures: bool = False

    @property
    def nodes(self) -> int:
        """Servers of all instances."""
        return sum(phase.nodes * phase.instances for phase in self.phases.values())

    @property
    def npus(self) -> int:
        """Ranks of all instances."""
        return sum(phase.mesh.size * phase.instances for phase in self.phases.values())

    @property
    def num_speculative_tokens(self) -> int:
        """k of the decode steps."""
        return max((phase.num_speculative_tokens for phase in self.phases.values() if phase.name != "prefill"), default=0)

    def phase(self, name: str | None = None) -> Phase:
        """The phase of that name; by default the one that decodes.

        Raises:
            SpecError: naming the phases there are.
        """
        wanted = name or ("decode" if "decode" in self.phases else "mixed")
        if wanted not in self.phases:
            raise SpecError(f"deployment {self.id} has no phase {wanted!r}; it has {', '.join(self.phases) or f'none ({self.note})'}")
        return self.phases[wanted]


@cache
def deployments() -> Mapping[str, Deployment]:
    """All rows by id, in table order; one with `as` is as that row above it but for phases, results, note and what it says itself."""
    rows: dict[str, dict[str, Any]] = {}
    for own in json.loads(Path(__file__).with_name("deployments.json").read_text(encoding="utf-8")):
        base = rows[own.pop("as")] if "as" in own else {}
        rows[own["id"]] = {key: value for key, value in base.items() if key not in ("phases", "measured", "note")} | own
    return {name: _deployment(row) for name, row in rows.items()}


def deployment(name: str) -> Deployment:
    """The row of that id.

    Raises:
        SpecError: naming the nearest ids.
    """
    known = deployments()
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
        hint = f"near are {', '.join(near)}; " if near else ""
        raise SpecError(f"deployment {name!r} is not known; {hint}`npucompile deployments` lists all {len(known)}")
    return known[name]


SHARED_PREFIX_SLOTS = 4
"""State slots of a dp group for prefixes that its prompts share: one after the prefix, and room for others beside it."""


def default_for(model: str) -> Deployment | None:
    """The deployment a model is built for by default; None if it has none."""
    return deployment(DEFAULT[model]) if model in DEFAULT else None


def limits_for(deployment: Deployment, phase: Phase, page_size: int) -> Limits:
    """Sizes of one dp group's pools and requests.

    - A request takes input + output + k tokens, because the last step writes k candidates past the end. Without published lengths it
      takes the whole context.
    - Pages hold the published cap of cached tokens. Without a cap they hold every request at full length, with a shared prefix counted
      once. Where only a context length is published (vLLM uses whatever memory is left), all requests together get POOL_TOKENS, or one
      whole context if that is more.
    - Where prompts share a prefix, SHARED_PREFIX_SLOTS more keep states after it; models without states have no use for them
      (`checkpoint_slots.py`).
    - A request has k+1 state slots, and one on a prefill instance, which writes only the state after the last token. A prefill instance
      drafts too, because the decode instance begins with its drafts.

    Args:
        page_size: P, of the target.

    Raises:
        SpecError: the row has neither lengths nor a context.
    """
    requests, k = phase.group_requests, phase.num_speculative_tokens
    slots = 1 if phase.name == "prefill" else k + 1
    kept = SHARED_PREFIX_SLOTS if deployment.prefix_hit_rate else 0
    if deployment.input_len is not None and deployment.output_len is not None:
        longest = deployment.input_len + deployment.output_len + k
        shared = int(deployment.input_len * (deployment.prefix_hit_rate or 0))
        full = _pages(longest, page_size) + (requests - 1) * _pages(longest - shared, page_size)
    elif phase.context_len is not None:
        longest = phase.context_len
        full = min(requests * _pages(longest, page_size), _pages(max(longest, POOL_TOKENS), page_size))
    else:
        raise SpecError(f"deployment {deployment.id}, {phase.name}: neither input and output lengths nor a context length are published")
    pages = full if phase.max_total_tokens is None else max(_pages(phase.max_total_tokens, page_size), _pages(longest, page_size))
    longest = _pages(longest, page_size) * page_size
    return Limits(page_size, 1 + pages, 1 + requests * slots + kept, longest, slots, k, checkpoint_slots=kept)


def group_chunk(deployment: Deployment, phase: Phase) -> int | None:
    """Published most tokens of a prefill step of one dp group; None where prompts are not chunked.

    SGLang divides the tokens of its option among the dp groups (`chunked_prefill_size` in server_args.py), vLLM's are of one group.
    """
    if phase.chunk_len is None or deployment.engine != "sglang":
        return phase.chunk_len
    return phase.chunk_len // phase.mesh.axis("dp")


def prefill_chunk(deployment: Deployment) -> int:
    """Tokens of the static prefill chunk: the published prompt in equal parts of at most the published chunk.

    Where none is published, parts have at most UNCHUNKED tokens: with 4096 of them and ten of 512 experts per token an expert gets 80
    tokens, which makes its matrix products compute-bound, so that a longer chunk gains nothing and needs more memory for activations.
    Where the ranks of a group share a prompt's tokens it is MAX_CHUNK: each then has a few hundred.
    The parts are equal (in multiples of 128) because a padded token costs as much as a real one.

    Raises:
        SpecError: the deployment has no phase that prefills.
    """
    phase = prefilling(deployment)
    most = min(MAX_CHUNK, group_chunk(deployment, phase) or (MAX_CHUNK if phase.context_parallel else UNCHUNKED))
    if deployment.input_len is not None:
        parts = -(-deployment.input_len // most)
        most = min(most, -(-deployment.input_len // (parts * _CHUNK_MULTIPLE)) * _CHUNK_MULTIPLE)
    elif phase.context_len is not None:
        most = min(most, phase.context_len)
    return max(most // _CHUNK_MULTIPLE, 1) * _CHUNK_MULTIPLE


def prefill_sizes(deployment: Deployment) -> tuple[PrefillSize, ...]:
    """Sizes of the prefill steps of one dp group: one chunk, and as many whole prompts as the published tokens of a step hold.

    No more prompts than requests in flight. A prompt that takes several chunks has no other beside it, and where no length is published
    nobody can tell how many prompts the tokens hold.

    Raises:
        SpecError: the deployment has no phase that prefills.
    """
    chunk, phase = PrefillSize(prefill_chunk(deployment)), prefilling(deployment)
    published, prompt = group_chunk(deployment, phase), deployment.input_len
    if published is None or prompt is None or chunk.tokens < prompt:
        return (chunk,)
    prompts = min(published // chunk.tokens, phase.group_requests)
    return (chunk, chunk._replace(prompts=prompts)) if prompts > 1 else (chunk,)


def prefilling(deployment: Deployment) -> Phase:
    """The phase that prefills.

    Raises:
        SpecError: there is none.
    """
    return deployment.phase("prefill" if "prefill" in deployment.phases else "mixed")


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def _deployment(row: dict[str, Any]) -> Deployment:
    phases = {name: _phase(name, fields) for name, fields in row["phases"].items()}
    return Deployment(**(row | {"phases": phases}))


def _phase(name: str, fields: dict[str, Any]) -> Phase:
    buckets = parse_buckets(fields["buckets"]) if fields["buckets"] else ()
    return Phase(name, **(fields | {"mesh": Mesh.parse(fields["mesh"]), "buckets": buckets}))


def why_not(row: Deployment) -> str:
    """Why a deployment cannot be built; "" where it can."""
    if not row.phases:
        return f"no launch command is published: {row.note}"
    return "" if row.model in PRESETS else f"{row.model} is no preset: its family is not built here"
