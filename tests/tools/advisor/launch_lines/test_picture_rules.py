"""tools/advisor/launch_lines/picture_rules.py: whether a server takes pictures, how many, how large, and from where."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.launch_lines import finding

from npucompile.tools.advisor.launch_lines.imported import import_text
from npucompile.tools.advisor.launch_lines.tables import engine, of_topic, topics, variables
from npucompile.tools.builder.deployments import deployments
from npucompile.tools.notation import PUBLISHED_ENCODE
from npucompile.tools.serve.lines import lines_of

LIMITS = """--limit-mm-per-prompt '{"image": 7, "video": 0, "audio": 0}'"""


@pytest.mark.parametrize(
    ("engine", "flags", "status", "why"),
    [
        ("sglang", "--enable-multimodal", "mapped", f"--encode {PUBLISHED_ENCODE}"),
        ("sglang", "--enable-multimodal --disaggregation-mode decode", "unnecessary", "only decodes reads no pictures"),
        ("sglang", "--language-only", "carried", "--encode none of build, and serve --language-model-only"),
        ("vllm", "--language-model-only", "carried", "--encode none of build, and serve --language-model-only"),
        ("vllm", "--no-language-model-only", "mapped", "the default of --encode"),
        ("vllm", LIMITS, "mapped", "serve --limit-mm-per-prompt image=7,video=0"),
        ("vllm", "--limit-mm-per-prompt.image 2", "mapped", "serve --limit-mm-per-prompt image=2"),
        ("vllm", """--limit-mm-per-prompt '{"image": {"count": 3, "width": 512}}'""", "mapped", "serve --limit-mm-per-prompt image=3"),
        ("vllm", """--limit-mm-per-prompt '{"audio": 1}'""", "refused", "audio: a request has image and video beside text"),
        ("vllm", """--limit-mm-per-prompt '{"audio": 0}'""", "unnecessary", "nothing but image and video"),
        ("vllm", """--limit-mm-per-prompt '{"image": -1}'""", "refused", "a whole number of at least 0"),
        ("sglang", """--limit-mm-data-per-request '{"image": 2}'""", "mapped", "serve --limit-mm-per-prompt image=2"),
        ("vllm", "--allowed-media-domains a.example b.example", "mapped", "--allowed-media-host a.example --allowed-media-host b.example"),
        ("vllm", "--allowed-local-media-path /", "refused", "clients send data URLs"),
        ("vllm", """--mm-processor-kwargs '{"max_pixels": 1003520}'""", "refused", "mm_processor_kwargs; the largest of --encode"),
        ("vllm", "--mm-processor-kwargs '{}'", "unnecessary", "it is empty"),
        ("sglang", """--mm-process-config '{"image": {"max_pixels": 1}}'""", "refused", "a request says them itself"),
        ("vllm", "--mm-processor-cache-gb 0", "unnecessary", "kept by their SHA-256"),
        ("vllm", "--mm-encoder-tp-mode data", "unnecessary", "the build's partitioner"),
        ("vllm", "--skip-mm-profiling", "unnecessary", "resized to what the largest of --encode takes"),
        ("sglang", "--mm-attention-backend ascend_attn", "unnecessary", "which kernels compute a step"),
        ("sglang", "--encoder-urls http://a", "refused", "servers that only encode are not built"),
        ("vllm", "--enable-mm-embeds", "refused", "no embeddings of them"),
        ("vllm", "--video-pruning-rate 0.5", "refused", "all rows of its pictures"),
    ],
)
def test_what_becomes_of_a_flag(engine, flags, status, why):
    found = finding(engine, flags)
    assert found.status == status, found
    assert why in found.why


def test_the_commands_have_what_the_line_says_of_pictures():
    line = f"vllm serve /models/Qwen3.5-27B-w8a8 -tp 4 --max-num-seqs 8 --max-model-len 8192 {LIMITS} --allowed-media-domains a.example"
    (role,) = import_text(line).roles
    assert role.build.endswith(f"--encode {PUBLISHED_ENCODE}")
    assert "--limit-mm-per-prompt image=7,video=0 --allowed-media-host a.example" in role.serve
    assert [bucket.name for bucket in role.proposal.plan.buckets[:3]] == ["encode-b1-q256", "encode-b1-q1024", "encode-b1-q4096"]
    (role,) = import_text(line.replace('"image": 7', '"image": 0')).roles
    assert role.build.endswith("--encode none")
    (role,) = import_text("vllm serve /models/Qwen3-32B -tp 4 --max-num-seqs 8 --max-model-len 8192 --limit-mm-per-prompt.image 1").roles
    assert "--encode" not in role.build


def test_published_launches_that_take_pictures_are_built_with_them():
    rows = [row for row in deployments().values() if row.pictures]
    assert len(rows) == 10
    assert all(lines_of(row).build.endswith(f"--deployment {row.id} --encode {PUBLISHED_ENCODE}") for row in rows)
    assert sum("--encode" in lines_of(row).build for row in deployments().values() if row.phases) == 10


def test_what_is_of_pictures_is_said_with_words_of_pictures():
    """Names with GEMM, SYMM or COMM in them have MM as well, and are of kernels and communicators."""
    words = re.compile(r"(^|[-_])(mm|multimodal|image|video|media|vit|vlm)([-_]|$)", re.IGNORECASE)
    of_pictures = {name for name in topics() if name.startswith(("picture", "media"))}
    rows = [*variables().values(), *engine("vllm").rows, *engine("sglang").rows]
    assert {row.name for row in rows if row.topic in of_pictures and not any(map(words.search, row.names))} == set()


def test_every_flag_of_pictures_in_published_scripts_is_said():
    corpus = json.loads(Path(__file__).with_name("corpus.json").read_text())
    flags = {
        flag
        for entry in corpus
        for flag in re.findall(r"--(?:[a-z-]*mm-|enable-multimodal|allowed-[a-z-]*media|language-)[a-z-]*", entry["text"])
    }
    assert len(flags) >= 8
    assert {
        flag for flag in flags if flag not in engine("vllm").flags and flag not in engine("sglang").flags and not of_topic(flag)
    } == set()
