"""Turns the name of a published deployment into its mesh, buckets and limits."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ...graphs.errors import SpecError
from ...graphs.types import Limits, Mesh
from ..notation import parse_buckets

DEFAULT = {"qwen3.5-397b": "qwen35-397b-a3x8-in3k5-out1k5-50ms"}
"""Deployment that a model is built for when nothing is said."""

MAX_CHUNK = 4096
"""Most tokens of a prefill chunk; `prefill_chunk` says why."""

POOL_TOKENS = 2**19
"""Most KV tokens a group is given where its engine would take all memory that is left; `limits_for` says when."""

PHASES = ("mixed", "prefill", "decode")
_CHUNK_MULTIPLE = 128


@dataclass(frozen=True)
class Phase:
    """One kind of instance of a deployment: all of it ("mixed"), or one side of a deployment that splits prefill from decode.

    Attributes:
        mesh: dp groups of tp ranks, of one instance. SGLang publishes the world size as its tp; here tp is that of one group, for both
            engines.
        ep: ranks that share one set of experts; 1 where experts are not spread.
        nodes: servers of one instance.
        instances: how many there are.
        max_running_requests: most requests of one instance, all its groups together.
        buckets: decode batches with a graph of their own, per group; none where nothing is decoded.
        num_speculative_tokens: k, drafts per decode step.
        max_total_tokens: published cap of cached tokens of one group.
        context_len: published most tokens of one request.
        chunk_len: published most tokens of a prefill chunk; None where prompts are not cut.
        mem_fraction: published share of memory for weights and pools.
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

    @property
    def group_requests(self) -> int:
        """Most requests of one dp group; at least as many as its largest bucket has rows."""
        return max(-(-self.max_running_requests // self.mesh.axis("dp")), *self.buckets, 1)


@dataclass(frozen=True)
class Deployment:
    """One row of the public guides.

    Attributes:
        id: what `--deployment` calls it.
        model: name of the model; a preset's where there is one.
        engine: "sglang" or "vllm-ascend", whose guide published it.
        target: name of its target.
        quantization: of the weights and activations of linear layers: "w4a8", "w8a8" or "bf16"; which layers stay wider no guide says.
        draft_quantization: of the draft model; None where it is not stated.
        state_dtype: of recurrent states, "bfloat16" or "float32"; None for models without.
        phases: by name, "mixed" alone or "prefill" and "decode"; empty for a row that is not a launch line.
        input_len, output_len: tokens of the requests it was published for.
        prefix_hit_rate: share of the prompt that was cached already.
        tpot_target_ms: time per output token it was published for.
        concurrency: requests in flight when it was measured, all groups together.
        measured: published results: tpot_ms, accept_length, output_tokens_per_s, concurrency.
        source: the guide.
        note: what this table decided for the guide.
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
    input_len: int | None = None
    output_len: int | None = None
    prefix_hit_rate: float | None = None
    tpot_target_ms: float | None = None
    concurrency: int | None = None
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)
    note: str | None = None

    @property
    def nodes(self) -> int:
        """Servers, all instances together."""
        return sum(phase.nodes * phase.instances for phase in self.phases.values())

    @property
    def npus(self) -> int:
        """Ranks, all instances together."""
        return sum(phase.mesh.size * phase.instances for phase in self.phases.values())

    @property
    def num_speculative_tokens(self) -> int:
        """k of the steps that decode."""
        return max((p.num_speculative_tokens for p in self.phases.values() if p.name != "prefill"), default=0)

    def phase(self, name: str | None = None) -> Phase:
        """A phase by its name; without one the phase that decodes.

        Raises:
            SpecError: naming the phases there are.
        """
        wanted = name or ("decode" if "decode" in self.phases else "mixed")
        if wanted not in self.phases:
            raise SpecError(f"deployment {self.id} has no phase {wanted!r}; it has {', '.join(self.phases) or f'none ({self.note})'}")
        return self.phases[wanted]


@cache
def deployments() -> Mapping[str, Deployment]:
    """Every row, by id, in the order of the table."""
    rows: list[dict[str, Any]] = json.loads(Path(__file__).with_name("deployments.json").read_text(encoding="utf-8"))
    return {row["id"]: _deployment(row) for row in rows}


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


def default_for(model: str) -> Deployment | None:
    """The deployment a model is built for when nothing is said; None for a model that has none."""
    return deployment(DEFAULT[model]) if model in DEFAULT else None


def limits_for(deployment: Deployment, phase: Phase, page_size: int) -> Limits:
    """Sizes of one dp group's pools and requests.

    - A request is input, output and k tokens long: the last step writes k candidates past the end. Where no lengths are published it may
      fill the context, candidates included.
    - Pages hold the published cap of cached tokens. Where there is none they hold every request whole; but a prefix that was cached
      already is held once, and where only a context length is published (vLLM hands out whatever memory is left, which no number states)
      all requests together get at most POOL_TOKENS, or one whole context if that is more.
    - Slots are k+1 a request; 1 where nothing is decoded, for prefill writes the state after its last token only. It drafts all the
      same: the side that decodes begins with its drafts.

    Args:
        page_size: P, of the target.

    Raises:
        SpecError: when the row publishes neither lengths nor a context.
    """
    requests, k = phase.group_requests, phase.num_speculative_tokens
    slots = 1 if phase.name == "prefill" else k + 1
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
    return Limits(page_size, 1 + pages, 1 + requests * slots, _pages(longest, page_size) * page_size, slots, k)


def prefill_chunk(deployment: Deployment) -> int:
    """Tokens of the static prefill chunk: the published prompt in equal parts of at most MAX_CHUNK, or of the row's own chunk.

    At 4096 tokens each of 512 experts with ten chosen sees 80 of them, so products are bound by arithmetic and a longer chunk gains
    nothing, while activations grow with it; the guides' own launches cut long prompts into rounds of 3584 and 4096 tokens. Equal parts
    (in multiples of 128) because a padded token costs as much as a real one.

    Raises:
        SpecError: when the deployment has no phase that prefills.
    """
    phase = deployment.phase("prefill" if "prefill" in deployment.phases else "mixed")
    most = min(MAX_CHUNK, phase.chunk_len or MAX_CHUNK)
    if deployment.input_len is not None:
        parts = -(-deployment.input_len // most)
        most = min(most, _round_up(-(-deployment.input_len // parts), _CHUNK_MULTIPLE))
    elif phase.context_len is not None:
        most = min(most, phase.context_len)
    return max(most // _CHUNK_MULTIPLE, 1) * _CHUNK_MULTIPLE


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _deployment(row: dict[str, Any]) -> Deployment:
    phases = {name: _phase(name, fields) for name, fields in row["phases"].items()}
    return Deployment(**(row | {"phases": phases}))


def _phase(name: str, fields: dict[str, Any]) -> Phase:
    buckets = parse_buckets(fields["buckets"]) if fields["buckets"] else ()
    return Phase(name, **(fields | {"mesh": Mesh.parse(fields["mesh"]), "buckets": buckets}))
