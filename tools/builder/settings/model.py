"""Settings that say in which numbers a model computes, what drafts, and what a step returns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....lowering import isa
from ...notation import format_buckets, parse_buckets
from .record import CHECKPOINT, DEFAULT, PLAN, ROW, Setting, by_plan

if TYPE_CHECKING:
    from .recorded import Recorded

SCHEMES = ("none", "w8a8", "w8a8-all", "w4a8", "w4a8-all", "w4a16")
KV_CACHE_DTYPES = ("auto", "bfloat16", "int8", "int8-indexer")
MAX_LOGPROBS = 20
"""The most that OpenAI's API allows."""
MAX_DRAFTS = 7
"""The NPU's recurrent kernel verifies at most 8 tokens of a request at once."""


def default_widths(several: bool, drafts: int) -> tuple[int, ...]:
    """Tokens of a request that decode steps verify where nobody says so: with all drafts, or with none and with one, too."""
    most = drafts + 1
    return tuple(sorted({1, min(2, most), most})) if several else (most,)


def _cache_by(plan: Any, quantised: bool) -> str:
    if plan.deployment and not quantised and plan.model.config.variant.formats.kv_cache:
        return ROW
    return CHECKPOINT if quantised and plan.model.config.variant.formats.kv_cache else DEFAULT


def _cache(recorded: Recorded) -> str:
    forms = recorded.manifest.formats.get("kv_cache") or ()
    rounded = [str(pattern) for pattern, form in forms if "int8" in str(form)]
    # Not models.quant's own pattern, whose room loads torch.
    return "int8-indexer" if rounded and all(name.endswith(".indexer") for name in rounded) else "int8" if rounded else recorded.dtype


def _stored(scheme: str) -> str:
    special = {"none": "Matrices are floats.", "checkpoint": "Matrices are stored as the checkpoint has them."}
    return special.get(scheme, f"Matrices are stored as {scheme}.")


def _drafts_by(plan: Any, quantised: bool) -> str:
    if plan.deployment and plan.limits.drafts:
        return ROW
    return DEFAULT if plan.source.has_draft_head else CHECKPOINT


def _no_head(by: str, recorded: Recorded) -> tuple[str, str] | None:
    """Why a step drafts nothing where nobody said so, and what changes it."""
    if by != CHECKPOINT:
        return None
    missing = "The checkpoint has no tensor of the draft head that its configuration declares."
    why = missing if recorded.declares_draft_head else "The model has no draft head."
    return why, "A checkpoint with a draft head, or --draft-model, changes it."


def _widths(plan: Any) -> str:
    from ....graphs.steps.table import kind_of  # Late: it loads torch, and options of every command come from here.

    widths = tuple(sorted({bucket.q_len for bucket in plan.buckets if kind_of(bucket).decodes}))
    # Repeated builds name their buckets.
    return format_buckets(widths) if widths and widths != default_widths(False, plan.limits.drafts) else ""


def _draft_model(recorded: Recorded) -> object:
    draft = recorded.manifest.model.get("draft_model")
    return draft and draft["name"]


def _absolute(file: str | None) -> str:
    return "" if file is None else file if file.lstrip().startswith("{") else str(Path(file).resolve())


def _code(recorded: Recorded) -> str:
    needed = recorded.manifest.cpu_features
    return f", by code for {isa.level_of(needed)}; kernels for what is beyond it are chosen where it is served" if needed else ""


DTYPE = Setting(
    "dtype",
    "Computing type.",
    lambda plan: str(plan.dtype).removeprefix("torch."),
    legal=("auto", "float32", "bfloat16"),
    extra={"default": "auto", "show_default": True},
    by=lambda plan, quantised: PLAN if len(plan.target.dtypes) > 1 else DEFAULT,
    recorded=lambda recorded: recorded.dtype,
    what=lambda value, recorded: f"It computes in {value}{_code(recorded)}.",
    planned="The plan chose it for the CPU that the build ran on: bfloat16 on x86, which every instruction set widens as it reads it.",
    explained=5,
)
QUANTIZATION = Setting(
    "quantization",
    "Parameter quantization.  [default: none, or the deployment's]",
    lambda plan: plan.quantization if plan.mesh.size > 1 or not plan.target.local else "",
    legal=SCHEMES,
    by=lambda plan, quantised: ROW if plan.deployment else CHECKPOINT if quantised else DEFAULT,
    recorded=lambda recorded: "checkpoint" if recorded.manifest.formats.get("stored") else recorded.manifest.quantization,
    what=lambda value, recorded: _stored(value),
    change="weights take less memory and time, and the model's answers change a little",
    explained=6,
)
KV_CACHE_DTYPE = Setting(
    "kv-cache-dtype",
    "Type of cached keys and values: auto is the checkpoint's or the deployment's, else the computing type; int8 halves pages, "
    "int8-indexer rounds an indexer's keys alone.",
    lambda plan: "" if plan.options.kv_cache_dtype == "auto" else plan.options.kv_cache_dtype,
    legal=KV_CACHE_DTYPES,
    extra={"default": "auto", "show_default": True},
    by=_cache_by,
    recorded=_cache,
    what=lambda value, recorded: f"Keys and values are cached in {value}.",
    change="int8 halves the pages, and the model's answers change a little",
    explained=7,
)
EXPERT_COMBINE_DTYPE = Setting(
    "expert-combine-dtype",
    "For NPUs: type in which rows come back from experts that got them in int8: auto is the computing type; int8 is 5/8 of its bytes.",
    lambda plan: "" if plan.options.expert_combine_dtype == "auto" else plan.options.expert_combine_dtype,
    legal=("auto", "int8"),
    extra={"default": "auto", "show_default": True},
    recorded=lambda recorded: recorded.manifest.formats.get("sent_back") or None,
    what=lambda value, recorded: f"Rows come back from their experts in {value}.",
    change="int8 with a scale for each eight values takes less time on links, and the model's answers change a little",
    seldom=True,
)
SPECULATIVE_TOKENS = Setting(
    "speculative-tokens",
    "Tokens that each step drafts and the next step verifies.  [default: 3 with a draft head, or the deployment's]",
    lambda plan: plan.limits.drafts,
    field="num_speculative_tokens",
    legal=(0, MAX_DRAFTS),
    by=_drafts_by,
    recorded=lambda recorded: recorded.manifest.limits.drafts,
    what=lambda value, recorded: "Steps draft nothing." if value == "0" else f"Each step drafts {value} tokens.",
    change="each draft is verified by the next step, whose graph gets a row more for every request",
    unchosen=_no_head,
    same=("--speculative-num-steps", "--num-speculative-tokens", "--spec-tokens"),
    otherwise={"--speculative-num-draft-tokens": "it counts the last known token too; legal is --speculative-tokens, one less"},
)
DRAFT_WIDTHS = Setting(
    "draft-widths",
    "Tokens of a request that decode steps verify, the last known one and its drafts, e.g. 1,2,4: a server takes those that give most "
    "tokens.  [default: 1, 2 and all on this machine where --buckets is not given, for NPUs all and those that "
    "give more of the largest batch, but of recurrent states all]",
    _widths,
    read=parse_buckets,
    extra={"metavar": "LIST"},
    recorded=lambda recorded: recorded.widths,
    what=lambda value, recorded: f"Decode steps verify {value} tokens of a request, its drafts among them.",
    change="each is a kind of step that is compiled for itself; without 1 a model whose drafts are refused decodes slower than without",
    seldom=True,
)
DRAFT_MODEL = Setting(
    "draft-model",
    "Draft head of a second checkpoint: a directory, or a preset of sizes.  [default: the model's own, if it has one]",
    lambda plan: plan.draft_name,
    extra={"metavar": "MODEL"},
    by=lambda plan, quantised: PLAN if plan.source.draft else DEFAULT,
    recorded=_draft_model,
    what=lambda value, recorded: f"Drafts come from {value}.",
    planned="The plan chose the preset of an EAGLE-3 head for this model, because the deployment drafts and names none.",
    same=("--speculative-draft-model-path", "--spec-model"),
)
DRAFT_VOCAB_SIZE = Setting(
    "draft-vocab-size",
    "Draft from the first so many tokens, in a byte-pair vocabulary the frequent ones: a draft reads so many rows of the head, and no "
    "output changes.  [default: all tokens]",
    lambda plan: plan.model.config.variant.draft_vocab or "",
    legal=(1, None),
    recorded=lambda recorded: recorded.draft_vocab or None,
    what=lambda value, recorded: f"Drafts are of the first {value} tokens of the vocabulary.",
    change="each draft reads so many rows of the head; other tokens are never drafted, so fewer drafts are accepted",
    otherwise={
        "--speculative-token-map": "it names a file of tokens; legal is --draft-vocab-size, the number of the vocabulary's first ones"
    },
)
EXPERT_MAP = Setting(
    "expert-map",
    "File that says which experts each rank holds, with copies, in SGLang's form or vllm-ascend's, or counts to plan it by.",
    lambda plan: _absolute(plan.options.expert_map),
    extra={"metavar": "FILE"},
    recorded=lambda recorded: recorded.argument("expert-map"),
    what=lambda value, recorded: f"Experts lie where {value} says.",
    change="experts move, or get copies; as many as before need no graphs anew",
    same=("--init-expert-location",),
)
EXPERT_COUNTS = Setting(
    "expert-counts",
    "Count how often each expert is chosen: GET /expert_counts of a server, for `npucompile experts` and --expert-map.",
    lambda plan: plan.model.config.variant.tells_experts or None,
    extra={"is_flag": True, "default": None},
    recorded=lambda recorded: "" if any(entry.tells_experts for entry in recorded.manifest.graphs) else None,
    what=lambda value, recorded: "A server counts how often each expert is chosen.",
    change="each step returns the experts of its tokens, of long prompts those of every so-manyth",
)
FAMILY = Setting(
    "family",
    "Python file of the model's family, where it is none of npucompile's: it ends with FAMILY = Family(...).",
    lambda plan: plan.source.family_file.path if plan.source.family_file else "",
    extra={"metavar": "FILE"},
)
LOGPROBS = Setting(
    "max-logprobs",
    "Most likely tokens whose log probabilities a request may ask for.  [default: 20, for NPUs where steps take at most 2 % longer]",
    lambda plan: plan.max_logprobs,
    legal=(0, MAX_LOGPROBS),
    recorded=lambda recorded: max((entry.max_logprobs for entry in recorded.manifest.graphs), default=0),
    what=lambda value, recorded: (
        "No request gets log probabilities." if value == "0" else f"A request gets up to {value} log probabilities a token."
    ),
    change="log probabilities cost every step time, whether a request asks for them or not",
    seldom=True,
)
STRUCTURED_OUTPUTS = Setting(
    "structured-outputs",
    "Requests of one step, of one dp group, whose output may follow a grammar; the others wait a step.  [default: 8]",
    lambda plan: plan.limits.bitmasks,
    legal=(0, None),
    recorded=lambda recorded: recorded.manifest.limits.bitmasks,
    what=lambda value, recorded: f"Up to {value} requests{recorded.group} of a step follow a grammar.",
    change="each takes a bitmask over the vocabulary in every step's inputs",
    seldom=True,
)
LOGIT_ADJUSTMENTS = Setting(
    "logit-adjustments",
    "Biases and penalties of one step, of one dp group; a request may have one of each, and the others wait a step.  "
    "[default: 8, for NPUs where steps take at most 2 % longer]",
    lambda plan: plan.limits.logit_adjustments,
    legal=(0, None),
    recorded=lambda recorded: recorded.manifest.limits.logit_adjustments,
    what=lambda value, recorded: f"A step takes {value} biases and penalties{recorded.group}.",
    change="each takes a row over the vocabulary in every step's inputs",
    seldom=True,
)
WHERE_WEIGHTS = Setting(
    "weights",
    "For NPUs: stored copies the weights into the artifact, bound reads the checkpoint when serving; auto copies up to 8 GiB.  "
    "[default: auto]",
    lambda plan: "" if plan.target.local or plan.weights == "none" else plan.weights,
    legal=("auto", "stored", "bound"),
    by=by_plan,
    recorded=lambda recorded: "bound" if recorded.manifest.checkpoint else "stored" if recorded.manifest.weights else None,
    what=lambda value, recorded: f"Weights are {value}.",
    planned="The plan copies checkpoints of up to 8 GiB into the artifact, and refers to larger ones.",
    change="stored ones make the artifact complete, bound ones make it small",
)
