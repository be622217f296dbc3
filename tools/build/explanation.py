"""Says in plain sentences what a build decided, who decided it, and what would change it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from ...graphs.types import DTYPES, Mesh
from ...lowering.artifact.manifest import Manifest
from ...models import draft_vocabulary, registry
from ...models.family_file import FamilyFile
from ..notation import PrefillSize, format_buckets, format_prefill
from .decisions import CHECKPOINT, DEFAULT, FLAG, PLAN, ROW, SETTINGS


@dataclass(frozen=True)
class Explained:
    """A setting of an artifact.

    Attributes:
        name: the option of `npucompile build` that sets it.
        value: as that option takes it; "" for none.
        by: who decided it: one of `decisions.DECIDERS`, or "" where the artifact does not say.
        what, why, change: sentences.
    """

    name: str
    value: str
    by: str
    what: str
    why: str
    change: str


def explanation(manifest: Manifest) -> list[Explained]:
    """All settings of an artifact that has them, in the order of `decisions.SETTINGS`."""
    explained = []
    for name in SETTINGS:
        value = VALUES[name](manifest)
        if value is None:
            continue
        by = manifest.decided_by.get(name, "")
        explained.append(Explained(name, value, by, _what(name, value, manifest), _why(name, by, manifest), _change(name, by)))
    return explained


def _why(name: str, by: str, manifest: Manifest) -> str:
    sentences = {
        FLAG: f"The build was told so with --{name}.",
        ROW: f"The published deployment {manifest.deployment} says so.",
        CHECKPOINT: _no_head(manifest) if name == "speculative-tokens" else "The checkpoint says so.",
        PLAN: PLANNED.get(name, "The plan chose it."),
        DEFAULT: "It is the default.",
    }
    return sentences.get(by, "The artifact does not record who decided it; a new build does.")


def _no_head(manifest: Manifest) -> str:
    """Why a step drafts nothing where nobody said so."""
    model, family = manifest.model, FamilyFile.recorded(manifest.model)
    if not registry.from_config(str(model["name"]), json.loads(model["config"]), family=family).has_draft_head:
        return "The model has no draft head."
    return "The checkpoint has no tensor of the draft head that its configuration declares."


def _change(name: str, by: str) -> str:
    if (name, by) == ("speculative-tokens", CHECKPOINT):
        return "A checkpoint with a draft head, or --draft-model, changes it."
    also = CONSEQUENCES.get(name, "")
    row = f" It goes before what --deployment says of --{name}." if by == ROW else ""
    return f"--{name} changes it{f': {also}' if also else ''}.{row}"


PLANNED = {
    "dtype": "The plan chose it for the CPU that the build ran on: bfloat16 where that multiplies it in hardware.",
    "max-num-seqs": "The plan took as many as the largest bucket has rows.",
    "max-model-len": "The plan cut it to what the model takes.",
    "max-total-tokens": "The plan gave every request in flight room at full length, or as much as --kv-cache-memory or a rank takes.",
    "weights": "The plan copies checkpoints of up to 8 GiB into the artifact, and refers to larger ones.",
    "draft-model": "The plan chose the preset of an EAGLE-3 head for this model, because the deployment drafts and names none.",
    "prefill": "The plan took as many prompts in a step as a rank has memory for.",
}
"""Why the plan decides as it does, by setting."""

CONSEQUENCES = {
    "target": "graphs are lowered anew, for another machine",
    "mesh": "more ranks in tp make a step shorter, more groups in dp take more requests",
    "backend": "the same partitioned graphs are compiled otherwise",
    "quantization": "weights take less memory and time, and the model's answers change a little",
    "kv-cache-dtype": "int8 halves the pages, and the model's answers change a little",
    "buckets": "more of them leave fewer rows of padding and take longer to build; the largest bounds a step's requests",
    "prefill": "longer chunks take more memory for activations and fewer steps for a prompt",
    "max-model-len": "a longer context takes more pages for each request",
    "max-num-seqs": "more requests in flight take more pages and state slots",
    "max-total-tokens": "with fewer pages requests wait, or are preempted, sooner",
    "kv-cache-memory": "with fewer pages requests wait, or are preempted, sooner",
    "speculative-tokens": "each draft is verified by the next step, whose graph gets a row more for every request",
    "draft-vocab-size": "each draft reads so many rows of the head; other tokens are never drafted, so fewer drafts are accepted",
    "max-logprobs": "log probabilities cost every step time, whether a request asks for them or not",
    "structured-outputs": "each takes a bitmask over the vocabulary in every step's inputs",
    "weights": "stored ones make the artifact complete, bound ones make it small",
    "cann": "operators and attributes of another release are checked and used",
    "operator-packages": "operators of the packages take the place of CANN's where they do more",
}
"""What else a change changes, by setting."""


def _decode(manifest: Manifest) -> str | None:
    sizes = sorted({entry.bucket.batch for entry in manifest.graphs if entry.bucket.kind == "decode"})
    return format_buckets(sizes) if sizes else None


def _prefill(manifest: Manifest) -> str | None:
    sizes = {PrefillSize(entry.bucket.q_len, entry.bucket.batch) for entry in manifest.graphs if entry.bucket.kind == "prefill"}
    return format_prefill(list(sizes)) if sizes else None


def _max_logprobs(manifest: Manifest) -> str | None:
    return str(max((entry.max_logprobs for entry in manifest.graphs), default=0))


def _weights(manifest: Manifest) -> str | None:
    return "bound" if manifest.checkpoint else "stored" if manifest.weights else None


def _argument(option: str, manifest: Manifest) -> str | None:
    """The value that the build was given for an option, or None."""
    words = manifest.build_arguments
    return words[words.index(f"--{option}") + 1] if f"--{option}" in words else None


def _cache(manifest: Manifest) -> str | None:
    forms = manifest.formats.get("kv_cache") or ()
    return "int8" if any("int8" in str(form[-1]) for form in forms) else _dtype(manifest)


def _dtype(manifest: Manifest) -> str:
    """The name that `--dtype` has for it."""
    return str(DTYPES[manifest.dtype]).removeprefix("torch.")


def _draft_model(manifest: Manifest) -> str | None:
    return str(manifest.model["draft_model"]["name"]) if "draft_model" in manifest.model else None


def _draft_vocab(manifest: Manifest) -> str | None:
    return str(draft_vocabulary.recorded((leaf.name, leaf.aval.shape) for leaf in manifest.params) or "") or None


VALUES: dict[str, Callable[[Manifest], str | None]] = {
    "deployment": lambda manifest: manifest.deployment or None,
    "phase": lambda manifest: _argument("phase", manifest),
    "target": lambda manifest: manifest.target,
    "mesh": lambda manifest: manifest.mesh,
    "backend": lambda manifest: manifest.backend,
    "dtype": lambda manifest: _dtype(manifest),
    "quantization": lambda manifest: "checkpoint" if manifest.formats.get("stored") else manifest.quantization,
    "kv-cache-dtype": _cache,
    "buckets": _decode,
    "prefill": _prefill,
    "max-model-len": lambda manifest: str(manifest.limits.max_model_len),
    "max-num-seqs": lambda manifest: str(manifest.limits.num_request_slots - 1),
    "max-total-tokens": lambda manifest: str((manifest.limits.num_pages - 1) * manifest.limits.page_size),
    "kv-cache-memory": lambda manifest: _argument("kv-cache-memory", manifest),
    "speculative-tokens": lambda manifest: str(manifest.limits.drafts),
    "draft-model": _draft_model,
    "draft-vocab-size": _draft_vocab,
    "max-logprobs": _max_logprobs,
    "structured-outputs": lambda manifest: str(manifest.limits.bitmasks),
    "weights": _weights,
    "cann": lambda manifest: str(manifest.platform.get("cann") or "") or None,
    "operator-packages": lambda manifest: ",".join(manifest.platform.get("packages") or ()) or None,
}
"""Values of settings as the options take them; None where an artifact has no such setting."""


def _what(name: str, value: str, manifest: Manifest) -> str:
    group = " of each dp group" if Mesh.parse(manifest.mesh).axis("dp") > 1 else ""
    ranks = Mesh.parse(manifest.mesh).size
    sentences = {
        "deployment": f"It is built for the published deployment {value}.",
        "phase": f"It is the {value} side of the deployment.",
        "target": f"It is for {value}.",
        "mesh": f"It runs on {ranks} rank{'' if ranks == 1 else 's'}" + (f", mesh {value}." if ranks > 1 else "."),
        "backend": f"Graphs are compiled by {value}.",
        "dtype": f"It computes in {value}.",
        "quantization": {"none": "Matrices are floats.", "checkpoint": "Matrices are stored as the checkpoint has them."}.get(
            value, f"Matrices are stored as {value}."
        ),
        "kv-cache-dtype": f"Keys and values are cached in {value}.",
        "buckets": f"Decode steps take {value} requests{group}.",
        "prefill": f"Prefill steps take {value} tokens{group}.",
        "max-model-len": f"A request has at most {value} tokens.",
        "max-num-seqs": f"At most {value} requests{group} are in flight.",
        "max-total-tokens": f"At most {value} tokens{group} are cached.",
        "kv-cache-memory": f"KV pages take at most {value} bytes of a rank.",
        "speculative-tokens": "Steps draft nothing." if value == "0" else f"Each step drafts {value} tokens.",
        "draft-model": f"Drafts come from {value}.",
        "draft-vocab-size": f"Drafts are of the first {value} tokens of the vocabulary.",
        "max-logprobs": "No request gets log probabilities."
        if value == "0"
        else f"A request gets up to {value} log probabilities a token.",
        "structured-outputs": f"Up to {value} requests{group} of a step follow a grammar.",
        "weights": f"Weights are {value}.",
        "cann": f"Graphs are lowered for CANN {value}.",
        "operator-packages": f"Operators of {value} are used.",
    }
    return sentences[name]
