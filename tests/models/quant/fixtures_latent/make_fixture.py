"""Makes latent_w8a8 with ModelSlim; not run by tests. In the environment of ../fixtures/README.md: `python make_fixture.py`.

ModelSlim 26.1.0's adapter for DeepSeek-V3 is written for an NPU, for transformers 4.48 with the model's own code, and for the files as
published: what it expects of them is made here, and `_on_a_cpu` changes what it does otherwise. Scales and integers are its own.
"""

from __future__ import annotations

import json
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "fixtures"))
import make_fixtures as others  # noqa: E402

HIDDEN, EXPERTS, LAYERS = 64, 8, 2
CONFIG = DeepseekV3Config(
    vocab_size=others.VOCABULARY,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS + 1,  # the layer of the draft head is made like the others
    first_k_dense_replace=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    intermediate_size=128,
    moe_intermediate_size=32,
    n_shared_experts=1,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
    max_position_embeddings=4096,
    rope_theta=1e4,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    num_nextn_predict_layers=1,
)
FILES = ("model-00001-of-000163.safetensors", "model-00163-of-000163.safetensors")
"""The second is the file, and 61 the layer, where the adapter looks for the draft head's own tensors."""


def _write_model(directory: Path) -> None:
    others._write_model(CONFIG, directory)
    tensors = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    torch.manual_seed(1)
    head = {f"{name}.weight": 1 + 0.2 * torch.randn(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    head["eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * (2 * HIDDEN) ** -0.5
    head["embed_tokens.weight"], head["shared_head.head.weight"] = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    head = {name: tensor.bfloat16().clone() for name, tensor in head.items()}
    tensors |= {name: torch.randn(EXPERTS) * 0.2 for name in list(tensors) if name.endswith("e_score_correction_bias")}
    tensors |= {f"model.layers.{LAYERS}.{name}": tensor for name, tensor in head.items()}
    save_file(tensors, directory / FILES[0])
    save_file({f"model.layers.61.{name}": tensor for name, tensor in head.items()}, directory / FILES[1])
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, FILES[0])}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _on_a_cpu() -> None:
    """Puts on the CPU what goes to an NPU, and lets transformers 4.51 run the layers."""

    def redirected(to: Any) -> Any:
        def moved(self: Any, *args: Any, **named: Any) -> Any:
            return to(self, *("cpu" if isinstance(arg, str) and arg == "npu" else arg for arg in args), **named)

        return moved

    torch.nn.Module.to, torch.Tensor.to = redirected(torch.nn.Module.to), redirected(torch.Tensor.to)
    # Its products give float32, which the matrices beside them do not take.
    linear, matmul = torch.nn.functional.linear, torch.matmul
    torch.nn.functional.linear = lambda x, w, b=None: linear(x.to(w.dtype), w, None if b is None else b.to(w.dtype))
    torch.matmul = lambda a, b: matmul(a.to(b.dtype), b)
    router, init = modeling_deepseek_v3.DeepseekV3TopkRouter, modeling_deepseek_v3.DeepseekV3TopkRouter.__init__

    def with_parameter(self: Any, config: Any) -> None:
        # The adapter reads parameters; in transformers this one is a buffer.
        init(self, config)
        self.e_score_correction_bias = torch.nn.Parameter(self._buffers.pop("e_score_correction_bias").float())

    router.__init__ = with_parameter
    from msmodelslim.model.deepseek_v3.model_adapter import DeepSeekV3ModelAdapter as Adapter

    preprocess = Adapter.mtp_preprocess

    def with_angles(self: Any, model: Any, *args: Any, **named: Any) -> Any:
        inputs, options = preprocess(self, model, *args, **named)
        return inputs, {**options, "position_embeddings": model.model.rotary_emb(inputs[0], options["position_ids"])}

    Adapter.mtp_preprocess = with_angles


def main() -> None:
    """Attention with static scales, feed-forwards and experts with one a token, as the recipe for DeepSeek-V3.2 has them."""
    _on_a_cpu()
    from msmodelslim.cli.__main__ import main as msmodelslim

    recipe = others.first(
        others.linears(others.TENSOR, others.CHANNEL, ["*self_attn*"], ["*kv_b_proj"]),
        others.linears(others.TOKEN, others.CHANNEL, ["*mlp*"], ["*gate"]),
    )
    with tempfile.TemporaryDirectory() as work:
        source, out, file, texts = (Path(work, name) for name in ("float", "out", "recipe.yaml", "texts.jsonl"))
        _write_model(source)
        texts.write_text("".join(json.dumps({"inputs_pretokenized": text}) + "\n" for text in others.TEXTS))
        file.write_text(json.dumps(recipe).replace(others.CALIBRATION, str(texts)))
        for path in (source, *source.iterdir(), file, texts):
            path.chmod(stat.S_IRWXU)
        out.mkdir(mode=0o700)
        sys.argv = ["msmodelslim", "quant", "--model_type", "DeepSeek-R1", "--model_path", str(source), "--save_path", str(out)]
        sys.argv += ["--device", "cpu", "--config_path", str(file), "--trust_remote_code", "False"]
        msmodelslim()
        kept = HERE / "latent_w8a8"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        for path in (path for pattern in ("config.json", "quant_model_*") for path in out.glob(pattern)):
            shutil.copyfile(path, kept / path.name)


if __name__ == "__main__":
    main()
