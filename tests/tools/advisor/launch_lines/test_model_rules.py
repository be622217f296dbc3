"""tools/advisor/launch_lines/model_rules.py: checkpoints, types of numbers, and what drafts."""

from __future__ import annotations

import pytest
from support.launch_lines import finding

from npucompile.tools.advisor.launch_lines.imported import import_text

MTP = """--speculative-config '{"method": "qwen3_5_mtp", "num_speculative_tokens": 2, "enforce_eager": true}'"""


@pytest.mark.parametrize(
    ("engine", "flags", "status", "why"),
    [
        ("sglang", "--dtype bfloat16", "carried", "--dtype bfloat16"),
        ("sglang", "--dtype auto", "unnecessary", "bfloat16 is what ascend-a3 computes in"),
        ("vllm", "--dtype float16", "refused", "ascend-a3 computes in bfloat16"),
        ("sglang", "--quantization modelslim", "mapped", "--quantization w8a8, which the checkpoint's name says (w8a8)"),
        ("vllm", "--quantization ascend", "mapped", "--quantization w8a8"),
        ("vllm", "--quantization awq", "refused", "awq is not built"),
        ("sglang", "--quantization fp8", "refused", "read as floats, which --quantization rounds"),
        ("sglang", "--quantization unquant", "unnecessary", "weights stay as the checkpoint has them"),
        ("sglang", "--kv-cache-dtype bf16", "mapped", "--kv-cache-dtype bfloat16"),
        ("vllm", "--kv-cache-dtype int8", "carried", "--kv-cache-dtype int8"),
        ("vllm", """--hf-overrides '{"hidden_size": 4096, "use_index_cache": true}'""", "unnecessary", "config.json says the same"),
        ("sglang", """--json-model-override-args '{"hidden_size": 9}'""", "refused", "hidden_size is 9: a checkpoint's config.json is"),
        ("vllm", "--kv-cache-dtype fp8", "refused", "legal are auto, bfloat16, int8"),
        ("sglang", "--tokenizer-path /models/Qwen3.5-397B-A17B-w8a8", "unnecessary", "it is the checkpoint's own"),
        ("vllm", "--tokenizer other", "refused", "the tokenizer is the checkpoint's tokenizer.json"),
        ("sglang", "--mamba-ssm-dtype bfloat16", "carried", "recurrent states are bfloat16"),
        ("vllm", "--mamba-ssm-cache-dtype float32", "refused", "--operator-packages vllm-ascend of build makes them float32"),
        ("vllm", "--mamba-ssm-cache-dtype auto", "unnecessary", "recurrent states are bfloat16"),
        ("sglang", "--model-checksum", "unnecessary", "an artifact has a digest"),
        ("vllm", MTP, "mapped", "--speculative-tokens 2"),
        ("vllm", """--speculative-config '{"method": "suffix", "num_speculative_tokens": 2}'""", "refused", "suffix: drafts come from"),
        ("vllm", "--speculative-config '[1]'", "refused", "it is no JSON object"),
        ("vllm", "--speculative-config '{'", "refused", "takes JSON"),
    ],
)
def test_what_becomes_of_a_flag(engine, flags, status, why):
    found = finding(engine, flags)
    assert found.status == status, found
    assert why in found.why


def test_a_checkpoint_elsewhere_is_read_by_serve():
    (role,) = import_text("vllm serve /models/Qwen3-32B --tensor-parallel-size 16").roles
    assert "--checkpoint /models/Qwen3-32B" in role.serve
    assert role.findings[0].status == "mapped"
    (role,) = import_text("vllm serve qwen3-32b --tensor-parallel-size 16").roles
    assert (role.findings[0].status, "--checkpoint" in role.serve) == ("carried", False)


def test_a_scheme_that_nothing_names_is_refused():
    (role,) = import_text("vllm serve Qwen3-32B --tensor-parallel-size 16 --quantization ascend").roles
    found = next(each for each in role.findings if each.name == "--quantization")
    assert (found.status, "neither the flag nor the checkpoint's name says w8a8, w4a8 or w4a16" in found.why) == ("refused", True)


NEXTN = "--speculative-algorithm NEXTN --speculative-num-steps 3"


@pytest.mark.parametrize(
    ("flags", "name", "status", "why"),
    [
        (NEXTN, "--speculative-algorithm", "mapped", "--speculative-tokens 3, drafted by the model's own head"),
        (NEXTN, "--speculative-num-steps", "mapped", "--speculative-tokens 3"),
        (f"{NEXTN} --speculative-num-draft-tokens 4", "--speculative-num-draft-tokens", "mapped", "--speculative-tokens 3"),
        (f"{NEXTN} --speculative-num-draft-tokens 8", "--speculative-num-draft-tokens", "refused", "trees of drafts are not built"),
        (f"{NEXTN} --speculative-eagle-topk 1", "--speculative-eagle-topk", "unnecessary", "in any case"),
        (f"{NEXTN} --speculative-eagle-topk 4", "--speculative-eagle-topk", "refused", "one chain of them"),
        ("--speculative-num-steps 3", "--speculative-num-steps", "unnecessary", "nothing drafts without --speculative-algorithm"),
        ("--speculative-algorithm NGRAM", "--speculative-algorithm", "refused", "drafts come from the model's own head"),
        ("--speculative-algorithm NEXTN --speculative-num-steps 9", "--speculative-algorithm", "refused", "at most 7 tokens, not 9"),
        ("--speculative-draft-model-quantization unquant", "--speculative-draft-model-quantization", "unnecessary", "stays as its"),
        ("--speculative-draft-model-quantization w8a8", "--speculative-draft-model-quantization", "refused", "stays float"),
        (f"{NEXTN} --speculative-draft-model-path /x/head", "--speculative-draft-model-path", "refused", "no preset of a draft head"),
    ],
)
def test_what_becomes_of_a_flag_about_drafts(flags, name, status, why):
    found = finding("sglang", flags, name)
    assert found.status == status, found
    assert why in found.why


def test_an_eagle_head_is_a_second_checkpoint():
    text = (
        "sglang serve qwen3-32b --tp-size 16 --max-running-requests 8 --speculative-algorithm EAGLE3 --speculative-draft-model-path /x/head"
    )
    (role,) = import_text(f"{text} --speculative-num-steps 3").roles
    found = {each.name: each for each in role.findings}
    assert found["--speculative-draft-model-path"].why == "--draft-model qwen3-32b-eagle3: /x/head is not here"
    assert "--speculative-tokens 3 with --draft-model qwen3-32b-eagle3" in found["--speculative-algorithm"].why
    assert "--draft-model qwen3-32b-eagle3" in role.build


def test_a_model_without_a_head_drafts_nothing():
    (role,) = import_text("vllm serve qwen3-0.6b --tensor-parallel-size 1 --max-num-seqs 4 --spec-method mtp --spec-tokens 2").roles
    assert "--speculative-tokens 0" in role.build
    assert next(f for f in role.findings if f.name == "--spec-tokens").why.startswith("qwen3-0.6b has no draft head of its own here")


SGLANG = "sglang serve {} --tp-size 16 --max-running-requests 4 --speculative-algorithm {} --speculative-num-draft-tokens 8"
VLLM = 'vllm serve {} -tp 16 --max-num-seqs 4 --speculative-config \'{{"method": "{}", "num_speculative_tokens": 5}}\''


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3.5-27b"])
@pytest.mark.parametrize(
    ("line", "method"),
    [*((SGLANG, method) for method in ("NGRAM", "DFLASH")), *((VLLM, method) for method in ("ngram", "suffix", "draft_model"))],
)
def test_no_head_takes_the_place_of_a_drafting_that_is_not_built(model, line, method):
    (role,) = import_text(f"{line.format(model, method)}{' --speculative-draft-model-path z/Other-DFlash' if line is SGLANG else ''}").roles
    assert "--draft-model" not in role.build
    assert "--speculative-tokens 0" in role.build
    spoken = [each for each in role.findings if each.name.startswith("--spec")]
    assert {each.status for each in spoken} == {"refused"}
    assert all(each.why.startswith(f"{method}: drafts come from") for each in spoken)


@pytest.mark.parametrize(("model", "method"), [("qwen3-8b", "EAGLE"), ("qwen3-8b", "NEXTN"), ("qwen3.5-27b", "EAGLE3")])
def test_neither_head_takes_the_place_of_the_other(model, method):
    (role,) = import_text(SGLANG.replace("8", "4").format(model, method)).roles
    assert "--draft-model" not in role.build
    assert "--speculative-tokens 0" in role.build
    assert {each.status for each in role.findings if each.name.startswith("--spec")} == {"refused"}
