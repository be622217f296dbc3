"""Settings that say how much a step and a dp group take."""

from __future__ import annotations

from typing import Any

from ...byte_sizes import parse_bytes
from ...notation import (
    DEFAULT_ENCODE,
    EncodeSize,
    PrefillSize,
    format_buckets,
    format_encode,
    format_prefill,
    parse_buckets,
    parse_encode,
    parse_prefill,
)
from .record import DEFAULT, PLAN, ROW, Setting, by_plan, by_row

DEFAULT_BUCKETS = (1, 2, 4, 8, 16)
CPU_BUCKETS = (1, 4, 16, 64)
"""On this machine, of which memory may have room for the smaller ones only: executables there know no sizes, so few are enough."""

DEFAULT_PREFILL = (PrefillSize(32), PrefillSize(128))
ANY_SIZE_PREFILL = (PrefillSize(64), PrefillSize(512))
"""Where an executable takes any rows and tokens a row (decision 071): the largest are most tokens of a step, which any prompts share. A
step of more reads weights no cheaper, and streams wait for it. Short prompts take the smallest until there is an executable."""

_OR_ROW = "or the deployment's]"
_FEWER_PAGES = "with fewer pages requests wait, or are preempted, sooner"
_ALL_SIZES = "legal is --buckets with all sizes, as in --buckets 1,2,4,...,32"
_CHUNK = "legal is --prefill, with tokens of one prompt in one dp group, as in --prefill 2048"
_MEMORY = "memory is planned in bytes, not by a share; --kv-cache-memory bounds the pages of a rank, --max-total-tokens those of a dp group"


def _of_kind(plan: Any, kind: str) -> list[Any]:
    """The buckets of a kind of steps, smallest first."""
    from ....graphs.steps import table  # Late: it loads torch, and `--help` needs none.

    return list(getattr(table, kind).among(plan.buckets))


def _chunks(plan: Any, kind: str) -> str:
    """The sizes of those whose rows are chunks."""
    return format_prefill([PrefillSize(bucket.q_len, bucket.batch) for bucket in _of_kind(plan, kind)])


def _encode_argument(sizes: list[EncodeSize], plan: Any) -> str:
    """Sizes, and that there are none where a build would choose some."""
    chooses = plan.source.has_tower() if plan.target.local else plan.deployment and plan.source.tower and plan.phase != "decode"
    return format_encode(sizes) if sizes or chooses else ""


def _limit(plan: Any, otherwise: str) -> str:
    """Who decides a limit: the row where its limits are taken, the plan where it derives them from the row's."""
    return (ROW if plan.published else PLAN) if plan.deployment else otherwise


BUCKETS = Setting(
    "buckets",
    "Decode batch sizes (of one dp group), e.g. 2,4,...,64; auto: for the deployment's traffic, auto:FILE: `plan --buckets-out FILE`.  "
    f"[default: {format_buckets(DEFAULT_BUCKETS)}, on this machine what memory has room for of {format_buckets(CPU_BUCKETS)}, {_OR_ROW}",
    lambda plan: ",".join(map(str, dict.fromkeys(bucket.batch for bucket in _of_kind(plan, "DECODE")))),
    # `auto` is read later, when model and deployment are known.
    read=lambda text: text if text.partition(":")[0] == "auto" else parse_buckets(text),
    extra={"metavar": "LIST"},
    by=lambda plan, quantised: PLAN if plan.target.local and not plan.deployment else by_row(plan, quantised),
    recorded=lambda recorded: recorded.decode,
    what=lambda value, recorded: f"Decode steps take {value} requests{recorded.group}.",
    planned="The plan took as many of its sizes as memory has room for requests.",
    change="more of them leave fewer rows of padding and take longer to build; the largest bounds a step's requests",
    same=("--cuda-graph-bs", "--cuda-graph-bs-decode"),
    otherwise={
        "--cudagraph-capture-sizes": "it counts tokens of a step, drafts included; legal is --buckets, which counts requests",
        "--cuda-graph-max-bs": _ALL_SIZES,
        "--cuda-graph-max-bs-decode": _ALL_SIZES,
        "--max-cudagraph-capture-size": _ALL_SIZES,
    },
)
PREFILL = Setting(
    "prefill",
    "Prefill sizes: tokens of one prompt, or PROMPTSxTOKENS (of one dp group), e.g. 2048,4x512.  "
    f"[default: {format_prefill(ANY_SIZE_PREFILL)}, uncompiled {format_prefill(DEFAULT_PREFILL)}, {_OR_ROW}",
    lambda plan: _chunks(plan, "PREFILL"),
    read=parse_prefill,
    extra={"metavar": "LIST"},
    by=by_row,
    recorded=lambda recorded: recorded.prefill,
    what=lambda value, recorded: f"Prefill steps take {value} tokens{recorded.group}.",
    planned="The plan took as many prompts in a step as a rank has memory for.",
    change="longer chunks take more memory for activations and fewer steps for a prompt",
    otherwise={
        "--chunked-prefill-size": f"it counts the tokens of all dp groups; {_CHUNK}",
        "--max-num-batched-tokens": f"it counts decode steps too; {_CHUNK}",
        "--max-prefill-tokens": f"it counts all prompts of a step; {_CHUNK}, or --prefill 4x512 for several",
    },
)
SCORE = Setting(
    "score",
    "Sizes of steps that give log probabilities of prompts, in the notation of --prefill.  [default: none, and decode steps give them]",
    lambda plan: _chunks(plan, "SCORE"),
    read=parse_prefill,
    extra={"metavar": "LIST"},
    seldom=True,
    recorded=lambda recorded: recorded.score,
    what=lambda value, recorded: f"Prompts whose log probabilities are wanted take steps of {value} tokens{recorded.group}.",
    change="a step has logits of the whole vocabulary for each of its tokens in memory",
)
ENCODE = Setting(
    "encode",
    "Encode sizes, for pictures: patches of one segment (a picture, or two frames), or PATCHESxSEGMENTS (of one dp group), e.g. "
    f"256x4,1024; none takes no pictures.  [default: {format_encode(DEFAULT_ENCODE)} for a checkpoint with a vision tower on this machine, "
    "and for deployments that take pictures, else none]",
    lambda plan: _encode_argument([EncodeSize(b.q_len, b.batch) for b in _of_kind(plan, "ENCODE")], plan),
    read=parse_encode,
    extra={"metavar": "LIST"},
    by=by_plan,
    recorded=lambda recorded: recorded.encode,
    what=lambda value, recorded: f"Encode steps take pictures of {value} patches{recorded.group}.",
    planned="The plan took what the context has room for.",
    change="the largest bounds a picture; more of them leave less padding and take longer to build",
)
LANGUAGE_MODEL_ONLY = Setting(
    "language-model-only",
    f"The same as --encode {format_encode(())}: no vision tower is read, and a prompt has no pictures.",
    lambda plan: "",
    extra={"is_flag": True, "default": None},
    seldom=True,
)
MAX_MODEL_LEN = Setting(
    "max-model-len",
    "Longest request in tokens, prompt and output.  [default: what the model and memory take, or the deployment's]",
    lambda plan: "" if plan.published else plan.limits.max_model_len,
    legal=(1, None),
    by=lambda plan, quantised: _limit(plan, PLAN if plan.target.local else DEFAULT),
    recorded=lambda recorded: recorded.manifest.limits.max_model_len,
    what=lambda value, recorded: f"A request has at most {value} tokens.",
    planned="The plan took what the model takes and memory has room for.",
    change="a longer context takes more pages for each request",
    same=("--context-length",),
)
MAX_NUM_SEQS = Setting(
    "max-num-seqs",
    "Most requests in flight per dp group.  [default: the largest bucket]",
    lambda plan: "" if plan.published else plan.limits.num_request_slots - 1,
    legal=(1, None),
    by=lambda plan, quantised: _limit(plan, PLAN),
    recorded=lambda recorded: recorded.manifest.limits.num_request_slots - 1,
    what=lambda value, recorded: f"At most {value} requests{recorded.group} are in flight.",
    planned="The plan took as many as the largest bucket has rows.",
    change="more requests in flight take more pages and state slots",
    otherwise={"--max-running-requests": "it counts all dp groups; legal is --max-num-seqs, for each of them"},
)
MAX_TOTAL_TOKENS = Setting(
    "max-total-tokens",
    f"Most tokens cached at once per dp group.  [default: every request at full length, {_OR_ROW}",
    lambda plan: plan.options.max_total_tokens or plan.own_total_tokens,
    legal=(1, None),
    by=lambda plan, quantised: _limit(plan, PLAN),
    recorded=lambda recorded: (recorded.manifest.limits.num_pages - 1) * recorded.manifest.limits.page_size,
    what=lambda value, recorded: f"At most {value} tokens{recorded.group} are cached.",
    planned="The plan gave every request in flight room at full length, or as much as --kv-cache-memory or a rank takes; on this machine "
    "no more than 4096 tokens, but for one.",
    change=_FEWER_PAGES,
    otherwise={"--mem-fraction-static": _MEMORY, "--gpu-memory-utilization": _MEMORY},
)
KV_CACHE_MEMORY = Setting(
    "kv-cache-memory",
    "The same in memory of one rank: its KV pages take at most this, e.g. 2GiB.  [default: as --max-total-tokens]",
    lambda plan: plan.options.kv_cache_memory,
    read=parse_bytes,
    extra={"metavar": "SIZE"},
    recorded=lambda recorded: recorded.argument("kv-cache-memory"),
    what=lambda value, recorded: f"KV pages take at most {value} bytes of a rank.",
    change=_FEWER_PAGES,
    otherwise={"--kv-cache-memory-bytes": "it counts recurrent states too; legal is --kv-cache-memory, for the KV pages of a rank"},
)
CHECKPOINT_SLOTS = Setting(
    "checkpoint-slots",
    "Recurrent states kept for later prompts, per dp group, beside those of requests.  [default: --max-num-seqs, for NPUs as many of "
    f"those as memory has room for, {_OR_ROW}",
    lambda plan: plan.own_checkpoint_slots,
    legal=(0, None),
    by=by_row,
    recorded=lambda recorded: recorded.manifest.limits.checkpoint_slots or None,
    what=lambda value, recorded: f"States after {value} prefixes{recorded.group} are kept.",
    change="each keeps a prefix of models with recurrent states, and takes the memory of a state",
    seldom=True,
)
