"""Random checkpoints with vision towers, made by transformers, and pictures for them."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support import oracle
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForConditionalGeneration

from npucompile.graphs.quantise import quantise_w8
from npucompile.graphs.steps.table import StepInputs
from npucompile.graphs.types import Bucket, Limits, Program
from npucompile.models import checkpoint, draft_source, encode_step, registry, step
from npucompile.models.draft_model import DRAFT, PREFIX
from npucompile.models.params import initialise
from npucompile.models.quant.declare import stored
from npucompile.models.quant.description import DESCRIPTION
from npucompile.runtime.picture_spans import Span, positions, spans

IDS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
ROTARY = {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
}  # fmt: skip
TEXT = oracle.settings("lllf", 0.5, rope_parameters=ROTARY)
MIXTURE = oracle.settings("lllf", 0.5, rope_parameters=ROTARY, num_experts=8, num_experts_per_tok=2)
EXPERTS = ", experts"
"""Behind the name of a tower: of a model that has them."""
TOWERS: dict[str, dict[str, Any]] = {
    "width 72": {"hidden_size": 144, "num_heads": 2, "intermediate_size": 100, "depth": 2, "num_position_embeddings": 49},
    "width 64": {"hidden_size": 192, "num_heads": 3, "intermediate_size": 77, "depth": 3, "num_position_embeddings": 16},
    "small patches": {"hidden_size": 40, "num_heads": 5, "intermediate_size": 64, "depth": 1, "num_position_embeddings": 36}
    | {"patch_size": 4},
}


@functools.cache
def model(name: str) -> Any:
    """A wrapped model of transformers whose every parameter is drawn: its own start hides wrong biases."""
    settings = {"in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, **TOWERS[name.removesuffix(EXPERTS)]}
    vision = {**settings, "out_hidden_size": TEXT["hidden_size"]}
    theirs: Any
    if name.endswith(EXPERTS):
        theirs = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=MIXTURE, vision_config=vision, **IDS)).eval()
    else:
        theirs = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=TEXT, vision_config=vision, **IDS)).eval()
    oracle.draw(theirs, 36)
    with torch.no_grad():
        # Sampled, they would be taken for pictures by transformers.
        theirs.lm_head.weight[list(IDS.values())] = 0
    return theirs


def saved(name: str, directory: Path) -> Path:
    """A checkpoint of a model, with published names."""
    model(name).save_pretrained(directory)
    return directory


def in_int8(directory: Path, description: dict[str, Any], prefix: str = "model.visual.") -> Path:
    """A checkpoint whose tower ModelSlim's recipe of the 397B has rounded: every matrix of its layers but the second of the feed-forward,
    with its bias beside it.

    Args:
        description: of its other tensors, as ModelSlim writes it; those that it does not name are floats.
        prefix: that names of the tower's tensors are given.
    """
    files = sorted(directory.glob("*.safetensors"))
    tensors = {name.replace("model.visual.", prefix): tensor for file in files for name, tensor in load_file(file).items()}
    types = dict.fromkeys(tensors, "FLOAT") | {name.replace("model.visual.", prefix): kind for name, kind in description.items()}
    for name in [name for name in tensors if f"{prefix}blocks." in name and tensors[name].dim() == 2 and "linear_fc2" not in name]:
        matrix = name.removesuffix(".weight")
        integers, scale = quantise_w8(tensors[name].t())
        tensors |= {name: integers.t(), f"{matrix}.weight_scale": scale[:, None], f"{matrix}.weight_offset": torch.zeros(len(scale), 1)}
        types |= dict.fromkeys((name, f"{matrix}.weight_scale", f"{matrix}.weight_offset"), "W8A8_DYNAMIC")
    for file in (*files, *directory.glob("*.safetensors.index.json")):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    (directory / DESCRIPTION).write_text(json.dumps({"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0", **types}))
    return directory


def patches(name: str, grids: list[tuple[int, int, int]], seed: int) -> torch.Tensor:
    """Random normalised patches of pictures and videos, one behind the other: [all patches, patch_dim] f32."""
    vision = model(name).config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    count = sum(t * h * w for t, h, w in grids)
    return (torch.randint(0, 256, (count, width), generator=torch.Generator().manual_seed(seed)).float() - 127.5) / 127.5


def as_bytes(normalised: torch.Tensor) -> torch.Tensor:
    """Patches as encode steps take them: u8."""
    return (normalised * 127.5 + 127.5).round().to(torch.uint8)


@torch.no_grad()
def rows(name: str, pixels: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
    """What transformers' tower makes of them: [all patches / 4, M] f32."""
    made: torch.Tensor = model(name).model.visual(pixels, grid_thw=torch.tensor(grids)).pooler_output
    return made


PAGE = 8
"""Tokens of a page in what `Server` runs."""


@dataclass
class Prompt:
    """A request with pictures.

    Attributes:
        tokens: so far, those that were sampled included.
        grids: of its pictures, in order.
        pixels: [all patches, patch_dim] of them.
        place: which of the requests of a server it is.
        rows: row of the pool that stands in the place of each token, 0 for none.
        count: tokens of the prompt.
        spans: where its pictures stand.
    """

    tokens: list[int]
    grids: list[tuple[int, int, int]]
    pixels: torch.Tensor
    place: int = 0
    rows: list[int] = field(default_factory=list)
    count: int = 0
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        self.count = len(self.tokens)
        self.spans = spans(self.tokens, {IDS["image_token_id"]: self.grids}, 2)

    @torch.no_grad()
    def logits(self, name: str) -> torch.Tensor:
        """Of transformers, after every token: [n, V]."""
        made: torch.Tensor = model(name)(**self._inputs(name)).logits[0]
        return made

    def greedy(self, name: str, answer: list[int]) -> list[int]:
        """The greedy tokens of transformers behind the prompt and behind each token of an answer but its last, by one pass over all of
        them: equal to the answer where that is greedy."""
        asked = Prompt(self.tokens[: self.count], self.grids, self.pixels)
        asked.tokens += answer[:-1]
        return asked.logits(name)[self.count - 1 :].argmax(-1).tolist()

    def _inputs(self, name: str) -> dict[str, torch.Tensor]:
        model(name).model.rope_deltas = None
        types = torch.tensor([[int(i < self.count and token == IDS["image_token_id"]) for i, token in enumerate(self.tokens)]])
        pictures = {"pixel_values": self.pixels, "image_grid_thw": torch.tensor(self.grids)} if self.grids else {}
        return {"input_ids": torch.tensor([self.tokens]), "mm_token_type_ids": types, **pictures}

    @torch.no_grad()
    def states(self, name: str) -> tuple[torch.Tensor, ...]:
        """Of transformers, the residual stream before and behind each layer: [1, n, M] each."""
        made: tuple[torch.Tensor, ...] = model(name)(**self._inputs(name), output_hidden_states=True).hidden_states
        return made

    def then(self, answer: list[int], later: Prompt) -> Prompt:
        """The next turn of a conversation: what was answered, and what `later` has."""
        pixels = [each.pixels for each in (self, later) if each.grids]
        tokens = [*self.tokens[: self.count], *answer, *later.tokens]
        return Prompt(tokens, [*self.grids, *later.grids], torch.cat(pixels) if pixels else self.pixels)


def prompt(name: str, parts: list[int | tuple[int, int]], seed: int) -> Prompt:
    """Numbers of random text tokens, and rows and columns of patches of pictures between them."""
    draw, tokens, grids = random.Random(seed), [], []
    for part in parts:
        if isinstance(part, int):
            tokens += [draw.randrange(1, 90) for _ in range(part)]
        else:
            grids.append((1, *part))
            tokens += [IDS["vision_start_token_id"], *[IDS["image_token_id"]] * (part[0] * part[1] // 4), IDS["vision_end_token_id"]]
    return Prompt(tokens, grids, patches(name, grids, seed) if grids else torch.zeros(0, 0))


class Server:
    """Runs programs that take pictures over one set of pools, which start as NaN; every row is greedy.

    Args:
        drafts: k; its head is random, since transformers has none.
        head: fields and tensors of an EAGLE-3 head in place of the model's own.
    """

    def __init__(
        self, name: str, directory: Path, drafts: int = 0, requests: int = 3, head: tuple[dict[str, Any], dict[str, Any]] | None = None
    ) -> None:
        found = registry.find(directory).model
        if head:
            found = draft_source.attached(found, head[0], tuple({"d2t", "embed_tokens.weight"} & set(head[1])))
        else:
            found = replace(found, config=replace(found.config, mtp_num_hidden_layers=int(drafts > 0)))
        self.model = replace(found, drafting=drafts > 0)
        self.limits = Limits(
            PAGE, 20 * requests + 1, (drafts + 1) * requests + 1, 160, slots_per_request=drafts + 1, drafts=drafts, picture_rows=200
        )
        tower = self.model.family.tower
        assert tower is not None
        self.tower = tower.read_config(json.loads((directory / "config.json").read_text()), "config.json")
        declared = self.model.params(torch.float32)
        read = {key: value for key, value in declared.items() if key not in ("mtp", DRAFT)}
        read[tower.key] = stored(tower.abstract_params(self.tower, torch.float32), self.tower.variant)
        self.weights = checkpoint.load(checkpoint.open_checkpoint(directory), read)
        self.encoder = self.weights.pop(tower.key)
        if head:
            self.weights[DRAFT] = oracle.join(declared[DRAFT], {PREFIX + key: tensor for key, tensor in head[1].items()})
        elif drafts:
            self.weights["mtp"] = initialise({"mtp": declared["mtp"]}, torch.Generator().manual_seed(5))["mtp"]
        self.state = oracle.poisoned(self.model.state(self.limits, torch.float32))
        self.used, self.drafted = 1, 0

    @torch.no_grad()
    def encode(self, request: Prompt) -> None:
        """Puts the rows of a request's pictures into the pool."""
        request.rows = [0] * request.count
        behind = 0
        for (_, h, w), span in zip(request.grids, request.spans, strict=True):
            pixels, behind = request.pixels[behind : behind + h * w], behind + h * w
            inputs = {"patches": as_bytes(pixels)[None], "grids": torch.tensor([[h, w]], dtype=torch.int32)}
            places = list(range(self.used, self.used + h * w // 4))
            inputs["picture_rows"] = torch.tensor([places], dtype=torch.int32)
            program = encode_step.program(self.model, self.tower, Bucket("encode", 1, h * w), self.limits, torch.float32)
            outputs, pool = program.forward({"vision": self.encoder}, {"picture_pool": self.state["picture_pool"]}, inputs)
            assert outputs["finite"].all()
            self.state |= pool
            request.rows[span.first : span.end] = places
            self.used += len(places)

    @torch.no_grad()
    def run(self, bucket: Bucket, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Outputs of the live rows of a step; each row names its inputs, and all else is padding."""
        operands = StepInputs(bucket, self.limits).padding()
        for name, tensor in operands.items():
            for b, row in enumerate(rows):
                if name in row:
                    value = torch.as_tensor(row[name], dtype=tensor.dtype)
                    tensor[b] = value if value.dim() == 0 else torch.cat([value, tensor[b, len(value) :]])
        program = step.program(self.model, bucket, self.limits, torch.float32)
        outputs = self.forward(program, operands)
        return {name: tensor[: len(rows)] for name, tensor in outputs.items()}

    def forward(self, program: Program, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Outputs of all rows of a step, which changes the pools."""
        outputs: dict[str, torch.Tensor]
        outputs, self.state = program.forward(self.weights, self.state, inputs)
        return outputs

    def prefill(self, bucket: Bucket, requests: list[Prompt], begin: int, end: int) -> dict[str, torch.Tensor]:
        """Tokens `begin` to `end` of each prompt, or as many of them as it has."""
        rows = []
        for request in requests:
            stop = min(end, request.count)
            places = positions(request.count, request.spans)
            rows.append(
                self._place(request)
                | {"tokens": request.tokens[begin:stop], "num_computed_tokens": begin, "query_lens": stop - begin}
                | {"state_slots_in": self._slots(request)[0], "state_slots_out": self._slots(request)[:1]}
                | {"next_tokens": request.tokens[stop] if stop < request.count else -1}
                | {"positions": places[begin:stop], "picture_rows": request.rows[begin : stop + 1]}
            )
        return self.run(bucket, rows)

    def decode(self, bucket: Bucket, requests: list[Prompt]) -> dict[str, torch.Tensor]:
        """A step behind the last token of each; the tokens that it accepts are added."""
        rows = [
            self._place(request) | {"drafts": self.limits.drafts, "base": len(request.tokens) - 1, "state_slots_out": self._slots(request)}
            for request in requests
        ]
        out = self.run(bucket, rows)
        for request, tokens, count in zip(requests, out["tokens"].tolist(), out["counts"].tolist(), strict=True):
            request.tokens += tokens[:count]
            self.drafted += count - 1
        return out

    def _place(self, request: Prompt) -> dict[str, Any]:
        return {"request_slots": request.place + 1, "page_table": [1 + 20 * request.place + i for i in range(20)]}

    def _slots(self, request: Prompt) -> list[int]:
        width = self.limits.slots_per_request
        return [1 + request.place * width + i for i in range(width)]
