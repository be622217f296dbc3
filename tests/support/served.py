"""What an artifact for NPUs serves, beside what its checkpoint computes on one device, eagerly and without drafts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support import ranks, tiny

from npucompile.graphs import tree
from npucompile.graphs.ops.sample import sample
from npucompile.graphs.types import Bucket, Limits, Tree
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.models import checkpoint, encode_step, registry
from npucompile.models.quant.description import formats_in
from npucompile.models.quant.recipes import formats_of_scheme
from npucompile.models.routing import Routing
from npucompile.models.step import PICTURES, Model
from npucompile.models.variant import Variant
from npucompile.runtime.executor import Executor
from npucompile.runtime.picture_spans import PictureInput, positions
from npucompile.tools.ranks.launch import opened_ranks
from npucompile.tools.ranks.offline import OfflineCompletion
from npucompile.tools.ranks.rank_settings import RankSettings

PAGE = 128
Shards = tuple[tuple[str, int], ...]
ROUNDINGS = 4.0
"""By how many times the difference between bfloat16 and float32 on one device a served logit may differ: ranks add in other orders."""

DENSE: dict[str, Any] = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "num_experts": 0, "intermediate_size": 64,
}  # fmt: skip
"""Changes to `tiny.CONFIG` and `tiny.NPU_SIZES` that make the model dense."""


def checkpoints(root: Path) -> dict[str, Path]:
    """A dense and a MoE checkpoint of random weights, and the bundled model, by name."""
    bundled = registry.find("qwen3.5-tiny").checkpoint_dir
    assert bundled is not None
    return {
        "dense": tiny.write_checkpoint(root / "dense", seed=3, agreeing=True, **tiny.NPU_SIZES | DENSE),
        "moe": tiny.write_checkpoint(root / "moe", seed=4, agreeing=True, **tiny.NPU_SIZES),
        "bundled": bundled,
    }


class Computed(NamedTuple):
    """What one device computes of T tokens: logits [T, V] f32 after each, and router logits [T, E] f32 of each layer with experts."""

    logits: torch.Tensor
    routers: list[torch.Tensor]


class OneDevice(NamedTuple):
    """A checkpoint's model on one device, in the quantised form that is served."""

    model: Model
    params: Tree

    @staticmethod
    def of(directory: Path, quantization: str, dtype: torch.dtype, shards: Shards = ()) -> OneDevice:
        """The model of a checkpoint, quantised there or by a scheme; it rounds the parts that ranks round (`Variant.shards`)."""
        model = registry.find(str(directory)).model
        formats = formats_in(directory) or formats_of_scheme(quantization, "qwen3.5-397b")
        variant = Variant(formats=formats, recurrent=dtype, shards=shards)
        tower = registry.find(str(directory)).tower
        model = replace(model, config=replace(model.config, variant=variant), tower=tower and replace(tower, variant=variant))
        declared = model.params(dtype) | (encode_step.params(model, model.tower, dtype) if tower else {})
        return OneDevice(model, checkpoint.load(checkpoint.open_checkpoint(directory), declared))

    @torch.no_grad()
    def run(self, tokens: Sequence[int], pictures: Sequence[PictureInput] = ()) -> Computed:
        """Runs these tokens, and the pictures that stand among them, in one pass."""
        count, dtype = -(-len(tokens) // PAGE), next(iter(tree.flatten(self.params)))[1].dtype
        limits = Limits(PAGE, 1 + count, 2, PAGE * count, picture_rows=1 + len(tokens) if pictures else 0)
        state = tree.map_leaves(lambda aval: torch.zeros(aval.shape, dtype=aval.dtype), self.model.state(limits, dtype))
        i32 = functools.partial(torch.tensor, dtype=torch.int32)
        inputs = {
            "tokens": i32([list(tokens)]),
            "page_table": i32([list(range(1, 1 + count))]),
            "num_computed_tokens": i32([0]),
            "query_lens": i32([len(tokens)]),
            "state_slots_in": i32([1]),
            "state_slots_out": i32([[1]]),
        }
        if pictures:
            inputs |= self._shown(tokens, pictures, limits, state)
        config, family = self.model.config, self.model.family
        hidden, _, intermediates = family.forward(config, self.params, state, inputs)
        return Computed(family.head(config, self.params, hidden).float(), [router.float() for router in intermediates.routers])

    def _shown(self, tokens: Sequence[int], pictures: Sequence[PictureInput], limits: Limits, state: Tree) -> Tree:
        """Inputs of a pass that reads pictures: the row of a token's picture is that of its place, from 1."""
        dtype, rows = state[PICTURES].dtype, torch.zeros(len(tokens), dtype=torch.int32)
        for picture in pictures:
            own = rows[picture.span.first : picture.span.end] = torch.arange(picture.span.first, picture.span.end, dtype=torch.int32) + 1
            inputs = {
                "patches": torch.from_numpy(picture.patches)[None],
                "grids": torch.tensor([picture.grid], dtype=torch.int32),
                "picture_rows": own[None],
            }
            bucket = Bucket("encode", 1, len(picture.patches))
            _, changed = encode_step.program(self.model, self.model.tower, bucket, limits, dtype).forward(self.params, state, inputs)
            state |= changed
        places = torch.from_numpy(positions(len(tokens), [picture.span for picture in pictures]))[None]
        return {"positions": places, "picture_rows": rows[None], "picture_pool": state[PICTURES].flatten(0, 2)}


@contextmanager
def emulated(artifact: Artifact, cache: Path, **fields: Any) -> Iterator[Executor]:
    """An executor of an artifact whose ranks are processes with emulated devices; `fields` are those of their settings."""
    settings = RankSettings(threads=1, device="emulated", cache=cache, **fields)
    with opened_ranks(artifact, None, settings, ranks.environment(), tiny.QUIET) as load_executor:
        yield load_executor()


class Agreement(NamedTuple):
    """How served tokens compare with one device's.

    Attributes:
        decided: for each token, whether the best one's margin, and that of the experts chosen for it in every layer, exceed the
            rounding, so that it had to be served.
        wrong: (position among the served tokens, token, the one that it had to be).
    """

    decided: tuple[bool, ...]
    wrong: tuple[tuple[int, int, int], ...]


def compare(
    directory: Path,
    quantization: str,
    prompt: Sequence[int],
    served: Sequence[int],
    shards: Shards = (),
    pictures: Sequence[PictureInput] = (),
) -> Agreement:
    """Compares greedy tokens with one device's, each after the tokens that were served before it."""
    fine, coarse = _both(directory, quantization, shards)
    tokens = [*prompt, *served[:-1]]
    computed, rounded = fine.run(tokens, pictures), coarse.run(tokens, pictures)
    logits, routed = computed.logits[len(prompt) - 1 :], _routed(fine, computed, rounded)[len(prompt) - 1 :]
    slack = ROUNDINGS * (logits - rounded.logits[len(prompt) - 1 :]).abs().amax(-1)
    best = logits.topk(2).values
    decided = (best[:, 0] - best[:, 1] > slack) & routed
    right = logits.argmax(-1)
    wrong = [
        (i, token, int(right[i]))
        for i, token in enumerate(served)
        # A token within the rounding of the best is as good as the best; another expert may make any other the best.
        if routed[i] and float(best[i, 0] - logits[i, token]) > float(slack[i])
    ]
    return Agreement(tuple(decided.tolist()), tuple(wrong))


@dataclass
class Checked:
    """Served tokens that were compared with one device's."""

    directory: Path
    scheme: str
    shards: Shards = ()
    decided: int = 0

    def check(
        self,
        prompts: list[list[int]],
        completions: list[OfflineCompletion],
        others: list[OfflineCompletion],
        pictures: Sequence[Sequence[PictureInput]] | None = None,
    ) -> None:
        """Compares completions with one device, and with others that may differ from them where one device is undecided alone.

        Recurrent state is rounded to bfloat16 between steps and not within one, so it depends on how many drafts a step accepts.
        """
        shown = pictures or [() for _ in prompts]
        for prompt, completion, other, own in zip(prompts, completions, others, shown, strict=True):
            tokens = completion.token_ids
            agreement = compare(self.directory, self.scheme, prompt, tokens, self.shards, own)
            assert not agreement.wrong, (prompt, tokens, agreement)
            self.decided += sum(agreement.decided)
            first = next((i for i, (left, right) in enumerate(zip(tokens, other.token_ids, strict=True)) if left != right), None)
            assert first is None or not agreement.decided[first], (prompt, first, tokens, other.token_ids)


def logits_of(directory: Path, quantization: str, prompt: Sequence[int], served: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """One device's logits [T, V] f32 of each served token, after those that were served before it: in float32, and in bfloat16."""
    fine, coarse = (device.run([*prompt, *served[:-1]]).logits[len(prompt) - 1 :] for device in _both(directory, quantization))
    return fine, coarse


def sampled(logits: torch.Tensor, uniform: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Tokens [T] that the CPU samples of logits [T, V] with random numbers [T]."""
    knob = functools.partial(torch.full, (len(logits),))
    knobs = knob(temperature), knob(0, dtype=torch.int32), knob(top_p), knob(0.0)
    return sample.rule("reference")(logits[:, None], *knobs, uniform[:, None])[:, 0]


def _routed(device: OneDevice, computed: Computed, rounded: Computed) -> torch.Tensor:
    """Whether the experts of each token are decided beyond the rounding, in all layers: [T] bool."""
    decided, biases = torch.ones(len(computed.logits), dtype=torch.bool), _router_biases(device.params)
    for fine, coarse, bias in zip(computed.routers, rounded.routers, biases, strict=True):
        scores, near = (logits if bias is None else logits.sigmoid() + bias for logits in (fine, coarse))
        # A group of experts is as good as its two best.
        decided &= _margin(device.model.config.routing, scores) > (2 if bias is not None else 1) * (scores - near).abs().amax(-1)
    return decided


def _router_biases(params: Tree) -> list[torch.Tensor | None]:
    """The bias of each layer's router, of those layers that have a router."""
    return [layer["mlp"].get("router_bias") for layer in params["layers"] if "router" in layer["mlp"]]


def _margin(routing: Routing, scores: torch.Tensor) -> torch.Tensor:
    """By how much the last expert that is chosen of scores [T, E] leads the next one, and the last group of experts the next: [T]."""
    margin = torch.full(scores.shape[:1], float("inf"))
    if routing.top_groups < routing.groups:
        grouped = scores.unflatten(1, (routing.groups, -1))
        groups = grouped.topk(2).values.sum(-1)
        best = groups.topk(routing.top_groups + 1).values
        margin = best[:, -2] - best[:, -1]
        scores = torch.where((groups >= best[:, -2:-1])[..., None], grouped, float("-inf")).flatten(1)
    best = scores.topk(routing.top_k + 1).values
    return torch.minimum(margin, best[:, -2] - best[:, -1])


@functools.lru_cache(maxsize=2)
def _both(directory: Path, quantization: str, shards: Shards = ()) -> tuple[OneDevice, OneDevice]:
    return OneDevice.of(directory, quantization, torch.float32, shards), OneDevice.of(directory, quantization, torch.bfloat16, shards)
