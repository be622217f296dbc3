"""tools/advisor/launch_lines/names.py: a name is a preset's, another published one of it, or unknown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.models import registry
from npucompile.models.presets import NAMES
from npucompile.tools.advisor.launch_lines.imported import import_text
from npucompile.tools.advisor.launch_lines.names import named_scheme, preset_of, unread_form

PUBLISHED = {name: preset for preset in registry.presets() for name in (preset, *NAMES.get(preset, ()))}
READ = (
    "",
    "-W8A8",
    "-w4a8-mtp",
    "_w8a8_mtp_quarot",
    "-quantized.w4a16",
    "-FP8",
    "-FP8-dynamic",
    "-FP8-BLOCK",
    "-W8A8-Dynamic",
    "-W8A8-3",
    "-bf16",
)


@given(st.sampled_from(sorted(PUBLISHED)), st.sampled_from(READ), st.sampled_from(("", "Qwen/", "/models/a b/", "$DIR/")))
def test_a_published_name_is_its_preset_whatever_form_builds_read(name, form, place):
    assert preset_of(f"{place}{name}{form}") == PUBLISHED[name]
    assert unread_form(f"{place}{name}{form}") is None


@given(st.sampled_from(sorted(PUBLISHED)), st.from_regex(r"[a-z]{3,9}[0-9]?", fullmatch=True), st.booleans())
def test_another_word_makes_another_model(name, word, before):
    known = {"bf16", "mtp", "quarot", "ascend", "modelslim", "fp8", "instruct", "thinking"}
    path = f"{word}-{name}" if before else f"{name}-{word}"
    assert preset_of(path) is None or word in known


@pytest.mark.parametrize(
    ("path", "preset"),
    [
        ("/models/Eco-Tech/Qwen3.5-397B-A17B-w4a8-mtp", "qwen3.5-397b"),
        ("vllm-ascend/DeepSeek-V3.2-W8A8", "deepseek-v3.2"),
        ("Eco-Tech/GLM-5.2-W4A8C8", "glm-5.2"),
        ("GLM-5.1-W8A8-C8", "glm-5"),
        ("Eco-Tech/GLM-4.7-W8A8-floatmtp", "glm-4.7"),
        ("deepseek-ai/DeepSeek-V3.1", None),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b-2507"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8/", "qwen3-30b-a3b-2507"),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", None),
        ("DeepSeek-R1-Distill-Qwen-7B", None),
        ("Qwen/Qwen3-Embedding-8B", None),
        ("Qwen/Qwen3-8B-Base", None),
        ("Qwen3-VL-30B-A3B-Instruct", None),
        ("Qwen3_32B", "qwen3-32b"),
        ("Qwen3-320B", None),
        ("~/.cache/huggingface/hub/models--Qwen--Qwen3-32B/snapshots/9216db5781bf21249d130ec9da846c4624c16137", "qwen3-32b"),
        ("/models/qwen3-32b/distilled", None),
    ],
)
def test_models_are_known_by_their_whole_name(path, preset):
    assert preset_of(path) == preset


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("Qwen/Qwen3-32B-AWQ", "awq"),
        ("Qwen/Qwen3-32B-GPTQ-Int8", "gptq"),
        ("nvidia/Qwen3-32B-NVFP4", "nvfp4"),
        ("nvidia/DeepSeek-R1-FP4", "fp4"),
        ("nvidia/Qwen3-32B-FP8-KV", "fp8-kv"),
        ("unsloth/Qwen3-32B-GGUF:Q4_K_M", "gguf"),
        ("/models/Qwen3-32B-Q4_K_M.gguf", "q4-k-m"),
        ("unsloth/Qwen3-32B-bnb-4bit", "bnb"),
        ("mlx-community/Qwen3-32B-4bit", "4bit"),
        ("acme/other-7b-AWQ", "awq"),
        ("AngelSlim/Qwen3-32B_eagle3", "eagle3"),
        ("lmsys/DeepSeek-R1-NextN", "nextn"),
        ("acme/Qwen3-32B-LoRA", "lora"),
    ],
)
def test_a_form_that_is_not_read_is_refused_by_its_word(path, word):
    (role,) = import_text(f"vllm serve {path} --tensor-parallel-size 4").roles
    assert (role.proposal.known, role.proposal.plan) == (False, None)
    assert (role.findings[0].status, f"says {word}, which is" in role.findings[0].why) == ("refused", True)
    assert import_text(f"vllm serve {path} -tp 16", model="qwen3-32b").roles[0].findings[0].status == "mapped"


def test_schemes_are_words_of_a_name():
    names = ("X-w8a8", "X-W4A8-mtp", "X-w4a16", "X-w8a80", "Xw8a8", "X")
    assert [named_scheme(name)[0] for name in names] == ["w8a8", "w4a8", "w4a16", None, None, None]


def test_a_model_that_nobody_knows_is_refused():
    (role,) = import_text("vllm serve deepseek-ai/DeepSeek-R1-0528-Qwen3-8B --tensor-parallel-size 4").roles
    assert (role.findings[0].status, role.proposal.known) == ("refused", False)
    assert "nor known by name" in role.findings[0].why


def test_the_series_of_2507_keeps_the_context_that_the_line_asks_for():
    (role,) = import_text("vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507 --tensor-parallel-size 4 --max-model-len 131072").roles
    assert role.proposal.arguments["max-model-len"] == "131072"
    rotary = role.proposal.plan.model.config.rotary
    assert (rotary.theta, role.proposal.plan.source.max_position_embeddings) == (1e7, 262144)
