"""`generate --image`, and a server of the same checkpoint: the tokens are those of transformers."""

from __future__ import annotations

import json

import openai
import pytest
from click.testing import CliRunner
from support import seeing
from support.published_pictures import encoded, picture
from support.shown import END, IMAGE, IMAGE_ID, START, codec, data_url

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.server.run import serving
from npucompile.tools.builder.driver import build
from npucompile.tools.builder.plan import Options, plan
from npucompile.tools.cli import main
from npucompile.tools.progress import Progress
from npucompile.tools.serve.serving import start_service

FILES = [encoded(picture(100, 70, 1)), encoded(picture(64, 64, 2))]
COUNT = 24


def places(files, before="", behind=""):
    shown = [seeing.prepared(data) for data in files]
    return before + "".join(f"{START}{IMAGE * one.tokens}{END}" for one in shown) + behind, shown


def expected(text, shown, count=COUNT):
    ids = codec().encode(text)
    return ids, seeing.greedy(ids, shown, count)


@pytest.mark.parametrize("template", [True, False])
def test_generated_tokens_are_those_of_transformers(tmp_path, template):
    checkpoint = seeing.saved(tmp_path / "seeing", template=template)
    arguments = ["generate", str(checkpoint), "--prompt", "what?", "--max-tokens", str(COUNT), "--dtype", "float32"]
    arguments += ["--json", "--ignore-eos"]
    for number, data in enumerate(FILES):
        (tmp_path / f"{number}.png").write_bytes(data)
        arguments += ["--image", str(tmp_path / f"{number}.png")]
    done = CliRunner().invoke(main, arguments, env={"NPUCOMPILE_HOME": str(tmp_path / "home")})
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    around = ("<|im_start|>user\n", "what?<|im_end|>\n<|im_start|>assistant\n") if template else ("", "what?")
    ids, tokens = expected(*places(FILES, *around))
    assert answer["token_ids"] == tokens
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of the checkpoint, uncompiled: openai's client and the service behind it."""
    root = tmp_path_factory.mktemp("served")
    planned = plan(Options(str(seeing.saved(root / "seeing")), buckets=(1, 2), dtype="float32", backend="eager"))
    build(planned, root / "artifact", root / "cache", Progress(quiet=True))
    artifact = Artifact.open(root / "artifact")
    running = start_service(artifact, lambda: CpuExecutor(artifact))
    try:
        with serving(running.service) as address:
            base = address.replace("ws://", "http://").removesuffix("/responses")
            yield openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=300), running.service
    finally:
        running.engine.stop(drain=False)
        running.closing.close()


def image(data):
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def ask(client, messages, **options):
    extra = {"ignore_eos": True, "return_token_ids": True}
    return client.chat.completions.create(model="seeing", messages=messages, max_tokens=COUNT, temperature=0, extra_body=extra, **options)


def test_a_server_answers_as_transformers_do(served):
    client, service = served
    text = [{"type": "text", "text": "what?"}]
    user = {"role": "user", "content": [*map(image, FILES), *text]}
    answer = ask(client, [user], n=2)
    prompt, shown = places(FILES, "<|im_start|>user\n", "what?<|im_end|>\n<|im_start|>assistant\n")
    ids, tokens = expected(prompt, shown)
    assert [choice.token_ids for choice in answer.choices] == [tokens, tokens]
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.prompt_tokens_details.image_tokens == sum(token == IMAGE_ID for token in ids)
    # Two completions of two pictures; each was encoded once, and is not again in a second turn.
    encoded_before = service.stats()["encoded_pictures_total"]
    assert encoded_before == len(FILES)
    said = answer.choices[0].message.content
    second = ask(client, [user, {"role": "assistant", "content": said}, {"role": "user", "content": [image(FILES[0]), *text]}])
    again, more = places(FILES[:1], "<|im_end|>\n<|im_start|>user\n", "what?<|im_end|>\n<|im_start|>assistant\n")
    assert second.choices[0].token_ids == expected(prompt + said + again, [*shown, *more])[1]
    assert service.stats()["encoded_pictures_total"] == encoded_before
