"""Pictures and videos that clients nobody here wrote send to a served checkpoint, whose tokens are those of transformers."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import Any

import httpx
import openai
import pytest
from support import pictured
from support.optional import PYTHON, needs_module
from support.published_pictures import encoded, picture
from support.shown import data_url
from support.videos import video

from npucompile.server.pictures.decoding import decode
from npucompile.server.pictures.video_file import read_video

COUNT = 8

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with pictured.served(tmp_path_factory.mktemp("pictured")) as (url, running):
        yield url, running


def answered(url: str, *parts: Any) -> tuple[list[int], list[int], Any]:
    """Token ids of a prompt and of its greedy answer, and the usage."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": list(parts)}]
    more = {"return_token_ids": True, "ignore_eos": True}
    answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=COUNT, extra_body=more)
    rendered = httpx.post(f"{url}/v1/chat/completions/render", json={"model": "tiny", "messages": messages})
    return rendered.json()["token_ids"], answer.model_dump()["choices"][0]["token_ids"], answer.usage


def image(data: bytes, kind: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, kind)}}


def test_png_and_jpeg_of_several_sizes_are_continued_as_by_transformers(served):
    url, _ = served
    files = [encoded(picture(70, 100, 1)), encoded(picture(120, 60, 2), "JPEG", quality=85), encoded(picture(64, 64, 3, "RGBA"), "WEBP")]
    parts = [
        part
        for file, kind in zip(files, ("png", "jpeg", "webp"), strict=True)
        for part in (image(file, kind), {"type": "text", "text": "and "})
    ]
    prompt, answer, usage = answered(url, *parts)
    shown = [pictured.PROCESSOR.picture(decode(file)) for file in files]
    assert answer == pictured.continued(prompt, shown, COUNT)
    assert usage.prompt_tokens_details.image_tokens == sum(each.tokens for each in shown)
    other = answered(url, image(encoded(picture(70, 100, 9)), "png"), *parts[1:])
    assert other[0] == prompt
    assert other[1] == pictured.continued(prompt, [pictured.PROCESSOR.picture(decode(encoded(picture(70, 100, 9)))), *shown[1:]], COUNT)


def test_a_video_is_continued_as_by_transformers(served):
    needs_module("av", "the extra video")
    url, running = served
    data = video(9)
    film = {"type": "video_url", "video_url": {"url": data_url(data, "mp4", "video")}}
    prompt, answer, usage = answered(url, film, {"type": "text", "text": "what is it?"})
    shown = pictured.Video(read_video(data, running.service.pictures.vision.videos))
    assert answer == pictured.continued(prompt, [shown], COUNT)
    assert usage.prompt_tokens_details.image_tokens == shown.tokens == 12


def test_sglang_s_benchmark_of_pictures_is_served(served, tmp_path):
    """Its processor only counts tokens for its report; LLaVA's is one that loads without torchvision."""
    if not PYTHON.exists():
        pytest.skip("`make clients` installs the clients that nobody here wrote; CI does")
    url, _ = served
    # It takes the name of the model for a directory, too.
    (own := tmp_path / "tiny").mkdir()
    (own / "chat_template.jinja").write_text(pictured.TEMPLATE)
    (own / "tokenizer.json").write_text(pictured.codec().library.to_str())
    marks = {"extra_special_tokens": {"image_token": "<|image_pad|>"}}
    (own / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **marks}))
    picture_fields = {"image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 56, "width": 56}, "size": {"shortest_edge": 56}}
    (own / "preprocessor_config.json").write_text(json.dumps(picture_fields))
    fields = {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "image_token": "<|image_pad|>",
        "vision_feature_select_strategy": "default",
    }
    (own / "processor_config.json").write_text(json.dumps(fields))
    (own / "config.json").write_text(json.dumps({"model_type": "llava"}))
    report, requests, tokens = tmp_path / "report.jsonl", 6, 12
    options = {
        "--backend": "sglang-oai-chat", "--base-url": url, "--model": "tiny", "--tokenizer": own, "--dataset-name": "image",
        "--image-count": 2, "--image-resolution": "64x96", "--image-format": "png", "--random-input-len": 24, "--random-output-len": tokens,
        "--random-range-ratio": 1, "--num-prompts": requests, "--max-concurrency": 3, "--warmup-requests": 1, "--output-file": report,
    }  # fmt: skip
    command = [PYTHON, "-m", "sglang.bench_serving", *(str(part) for option in options.items() for part in option)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert run.returncode == 0, run.stdout + run.stderr
    (result,) = (json.loads(line) for line in report.read_text().splitlines())
    assert (result["completed"], result["total_output_tokens"]) == (requests, requests * tokens), run.stdout


def encoded_so_far(url: str) -> int:
    (count,) = re.findall(r"^\S*encoded_pictures_total\S* (\d+)", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return int(count)


def test_a_picture_that_is_sent_twice_is_encoded_once(served):
    url, _ = served
    before = encoded_so_far(url)
    part = image(encoded(picture(90, 90, 77)), "png")
    first = answered(url, part, {"type": "text", "text": "one"})
    assert answered(url, {"type": "text", "text": "two "}, part)[0] != first[0]
    assert encoded_so_far(url) == before + 1
