"""Random EAGLE-3 heads on random models, and their arithmetic in plain torch: one pass over a whole text, without caches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support import oracle

from npucompile.models import draft_source
from npucompile.models.draft_model import DRAFT, PREFIX


def settings(random: oracle.Oracle, **changes: Any) -> dict[str, Any]:
    """Fields of the config.json of a head for a random model; outputs of its first layers are read."""
    target = random.model.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": 41,
        "hidden_size": target.hidden_size,
        "intermediate_size": 60,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e3,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1], "use_aux_hidden_state": True},
        **changes,
    }


def tensors(values: dict[str, Any], taps: int, target_width: int, parts: Sequence[str], seed: int = 3) -> dict[str, torch.Tensor]:
    """The tensors of a random head's checkpoint, by their names on disk."""
    generator = torch.Generator().manual_seed(seed)
    M, V, F, D = (values[name] for name in ("hidden_size", "draft_vocab_size", "intermediate_size", "head_dim"))
    H, G = values["num_attention_heads"], values["num_key_value_heads"]
    shapes = {
        "fc": (M, taps * target_width),
        "midlayer.self_attn.q_proj": (H * D, 2 * M),
        "midlayer.self_attn.k_proj": (G * D, 2 * M),
        "midlayer.self_attn.v_proj": (G * D, 2 * M),
        "midlayer.self_attn.o_proj": (M, H * D),
        "midlayer.mlp.gate_proj": (F, M),
        "midlayer.mlp.up_proj": (F, M),
        "midlayer.mlp.down_proj": (M, F),
        "lm_head": (V, M),
    }
    head = {f"{name}.weight": torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    for name in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"):
        head[f"{name}.weight"] = 1 + 0.3 * torch.randn(M, generator=generator)
    if "embed_tokens.weight" in parts:
        head["embed_tokens.weight"] = torch.randn(values["vocab_size"], M, generator=generator)
    if "d2t" in parts:
        ids = torch.randperm(values["vocab_size"], generator=generator)[:V].sort().values
        head["d2t"] = ids - torch.arange(V)
        head["t2d"] = torch.zeros(values["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    return head


def soften(target: Path, weight: float = 0.05) -> None:
    """Makes the layers of a checkpoint add little to the stream: a head that reads it before the last one is then right now and then."""
    weights = load_file(target / "model.safetensors")
    small = {name: t * weight for name, t in weights.items() if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))}
    save_file(weights | small, target / "model.safetensors")


def write_agreeing(directory: Path, target: Path, random: oracle.Oracle, **changes: Any) -> Path:
    """The checkpoint of a head that drafts what the last layer of the model of a checkpoint `target` would say; of three taps it reads
    the last one."""
    values, weights = settings(random, **changes), load_file(target / "model.safetensors")
    width = random.model.config.hidden_size
    head = tensors(values, 3, width, ("d2t",))
    head["fc.weight"] = torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], 1)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        head[f"midlayer.{name}.weight"] *= 0.1
    head["norm.weight"] = weights["model.norm.weight"]
    vectors = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    head["lm_head.weight"] = vectors[head["d2t"] + torch.arange(values["draft_vocab_size"])].contiguous()
    directory.mkdir()
    save_file(head, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(values))
    return directory


@dataclass(frozen=True)
class Head:
    """A random head and the model that it is for.

    Attributes:
        random: the model with the head and the weights of both.
        values: the head's config.json.
        tensors: of the head's checkpoint.
        taps: indices of transformers' hidden states that it reads.
        places: positions of tokens; none are their indices.
    """

    random: oracle.Oracle
    values: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    taps: tuple[int, ...]
    places: torch.Tensor | None = None

    @torch.no_grad()
    def drafts(self, text: Sequence[int], base: int, depth: int) -> list[int]:
        """Drafts after tokens 0 to base + 1 of a text, of which the model's pass has computed the first base + 1.

        Formulas: eagle/model/cnets.py of SafeAILab/EAGLE, `Model.forward` and `topK_genrate` with a tree of width one.
        """
        states = self.random.theirs(torch.tensor([text[: base + 1]]), output_hidden_states=True).hidden_states
        return self.drafts_from(states, text[1 : base + 2], depth)

    @torch.no_grad()
    def drafts_from(self, states: Sequence[torch.Tensor], following: Sequence[int], depth: int) -> list[int]:
        """The same, of the model's hidden states [1, T, M] of the first tokens and of the tokens behind each of them."""
        hidden = torch.cat([states[tap][0] for tap in self.taps], -1) @ self.tensors["fc.weight"].T
        ids, drafted = list(following), []
        for _ in range(depth):
            out = self._layer(ids, hidden)[-1:]
            logits = self._norm(out, "norm") @ self.tensors["lm_head.weight"].T
            token = int(logits.argmax())
            token += int(self.tensors["d2t"][token]) if "d2t" in self.tensors else 0
            drafted.append(token)
            ids, hidden = [*ids, token], torch.cat([hidden, out])
        return drafted

    def _layer(self, ids: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """Outputs [T, M] of the head's layer, from the hidden state before each token and the token."""
        w, D = self.tensors, self.values["head_dim"]
        table = w.get("embed_tokens.weight", self.random.theirs.get_input_embeddings().weight)
        normed = self._norm(hidden, "midlayer.hidden_norm")
        residual = normed if self.values.get("norm_before_residual") else hidden
        x = torch.cat([self._norm(table[torch.tensor(ids)], "midlayer.input_layernorm"), normed], -1)
        q, k, v = (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k, v = (part.view(len(ids), -1, D).transpose(0, 1) for part in (q, k, v))
        q, k = self._rotated(q), self._rotated(k)
        k, v = (part.repeat_interleave(q.shape[0] // part.shape[0], 0) for part in (k, v))
        scores = (q @ k.transpose(1, 2)) * D**-0.5
        scores = scores.masked_fill(torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
        stream = residual + mixed
        x = self._norm(stream, "midlayer.post_attention_layernorm")
        gate, up = (x @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return stream + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.values["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        places = torch.arange(x.shape[1]) if self.places is None else self.places[: x.shape[1]]
        turns = places[:, None] * self.values["rope_theta"] ** (-torch.arange(half) / half)
        a, b = x.split(half, -1)
        return torch.cat([a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()], -1)


def head(name: str, taps: tuple[int, ...] = (1, 1, 2), parts: tuple[str, ...] = ("d2t",), **changes: Any) -> Head:
    """A random head for one of `oracle.CASES`.

    Args:
        taps: indices of transformers' hidden states that the changed fields name.
    """
    random = oracle.case(name)
    values = settings(random, **changes)
    own = tensors(values, len(taps), random.model.config.hidden_size, parts)
    model = draft_source.attached(random.model, values, parts)
    declared = model.family.abstract_params(model.config, torch.float32)[DRAFT]
    weights = {**random.weights, DRAFT: oracle.join(declared, {PREFIX + name: tensor for name, tensor in own.items()})}
    weights.pop("mtp", None)
    return Head(replace(random, model=model, weights=weights), values, own, taps)
