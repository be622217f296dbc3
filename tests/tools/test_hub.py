"""tools/hub.py: names of a hub, from caches, and from a hub on loopback by the library that people fetch with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from io import StringIO
from types import ModuleType

import pytest
from support import tiny
from support.fake_hub import COMMIT, fake_hub

from npucompile.graphs.errors import CheckpointError, UnknownModel
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.models.directories import Origin
from npucompile.models.safetensors_files import open_checkpoint
from npucompile.tools.cli import Home
from npucompile.tools.hub import checkpoint_of
from npucompile.tools.progress import Progress
from npucompile.tools.ranks.rank_settings import RankSettings
from npucompile.tools.serve import serving

NAME = "Some-Org/Tiny-1.5"
QUIET = Progress(StringIO())


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, tiny_checkpoint):
    """A checkpoint of two shards, with what hubs have beside them."""
    from safetensors.torch import load_file, save_file

    directory = shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("sharded") / "model")
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, directory / shard)
    (directory / "model.safetensors").unlink()
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "original").mkdir()
    for other in ("original/params.json", "consolidated.safetensors", "README.md", "model.gguf", "tiktoken.model", "tokenization_kimi.py"):
        (directory / other).write_bytes(b"{}" * 1000)
    return directory


@pytest.fixture(autouse=True)
def _without_modelscope(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)


@pytest.fixture
def hub(sharded):
    with fake_hub() as hub:
        hub.add(NAME, sharded)
        yield hub


@pytest.fixture
def environment(tmp_path, hub):
    return {"HF_HOME": str(tmp_path / "hf"), "MODELSCOPE_CACHE": str(tmp_path / "ms"), "HF_ENDPOINT": hub.url}


SECOND = "model-00002-of-00002.safetensors"


def snapshot(tmp_path):
    return tmp_path / "hf" / "hub" / "models--Some-Org--Tiny-1.5" / "snapshots" / COMMIT


def test_what_is_no_name_of_a_hub_stays(tmp_path, environment, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("qwen3.5-tiny", "a/b", "/x/y", "./x/y", "../x", "a/b/c", "~/x", "x/"):
        assert checkpoint_of(name, environment, QUIET) == name


def test_a_name_is_fetched_once_and_only_what_is_read(tmp_path, hub, environment, sharded):
    said = StringIO()
    path = checkpoint_of(NAME, environment, Progress(said))
    assert path == str(snapshot(tmp_path))
    assert f"fetching {NAME} from {hub.url} into {tmp_path / 'hf' / 'hub'}" in said.getvalue()
    files = {file.relative_to(path).as_posix() for file in snapshot(tmp_path).rglob("*") if not file.is_dir()}
    unread = {"consolidated.safetensors", "README.md", "model.gguf", "original/params.json"}
    assert files == {file.relative_to(sharded).as_posix() for file in sharded.rglob("*") if file.is_file()} - unread
    assert open_checkpoint(path).tensors.keys() == open_checkpoint(sharded).tensors.keys()
    assert Origin.of(snapshot(tmp_path)) == Origin(NAME, COMMIT)
    asked = len(hub.asked)
    for name in (NAME, f"{NAME}@main", f"{NAME}@{COMMIT}"):
        assert checkpoint_of(name, environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}, QUIET) == path
    assert len(hub.asked) == asked


def test_a_configuration_alone_is_fetched_where_weights_are_not_read(tmp_path, hub, environment):
    path = checkpoint_of(NAME, environment, QUIET, weights=False)
    assert not list(snapshot(tmp_path).glob("*.safetensors"))
    assert checkpoint_of(NAME, environment, QUIET) == path
    assert sorted(set(hub.fetched()) & {"config.json"}) == ["config.json"]
    assert hub.fetched().count("config.json") == 1
    assert len(list(snapshot(tmp_path).glob("*.safetensors"))) == 2


def test_an_interrupted_fetch_goes_on_where_it_was(tmp_path, hub, environment, sharded):
    hub.cut[SECOND] = [1000] + [0] * 50
    with pytest.raises(CheckpointError, match=f"^{NAME} came from {hub.url} in part, and the next try goes on: .* lacks {SECOND}: "):
        checkpoint_of(NAME, environment, QUIET)
    assert not (snapshot(tmp_path) / SECOND).exists()
    hub.cut.clear()
    hub.asked.clear()
    path = checkpoint_of(NAME, environment, QUIET)
    assert hub.fetched() == [SECOND]
    assert (snapshot(tmp_path) / SECOND).read_bytes() == (sharded / SECOND).read_bytes()
    assert open_checkpoint(path).tensors.keys() == open_checkpoint(sharded).tensors.keys()


def test_other_bytes_than_the_hubs_digest_are_refused_and_fetched_again(tmp_path, hub, environment):
    hub.wrong.add(SECOND)
    with pytest.raises(CheckpointError, match=rf"{SECOND}: has sha256 \w+ and the hub says \w+; it is removed, and the next try"):
        checkpoint_of(NAME, environment, QUIET)
    hub.wrong.clear()
    hub.asked.clear()
    checkpoint_of(NAME, environment, QUIET)
    assert hub.fetched() == [SECOND]


def test_a_shard_that_the_hub_lacks_is_named(hub, environment):
    del hub.files[NAME][SECOND]
    with pytest.raises(CheckpointError, match=f"{NAME} has no {SECOND} at the hub; legal is a model with config.json and safetensors"):
        checkpoint_of(NAME, environment, QUIET)


def test_a_gated_model_says_what_opens_it(hub, environment):
    hub.gated.add(NAME)
    with pytest.raises(UnknownModel, match=f"{NAME} is gated: {hub.url}/{NAME} says who may have it; legal is HF_TOKEN"):
        checkpoint_of(NAME, environment, QUIET)


@pytest.mark.parametrize(("name", "words"), [("Some-Org/Other", "has no Some-Org/Other"), (f"{NAME}@v9", f"has no revision v9 of {NAME}")])
def test_what_the_hub_does_not_have_is_said_of_each(environment, hub, name, words, tmp_path):
    with pytest.raises(UnknownModel) as caught:
        checkpoint_of(name, environment, QUIET)
    said = str(caught.value)
    assert f"{hub.url} {words}" in said
    assert f"neither in {tmp_path / 'hf' / 'hub'} nor in {tmp_path / 'ms'}" in said
    assert "modelscope is not installed" in said


def test_offline_it_says_what_is_missing_and_where_it_was_looked_for(tmp_path, hub, environment):
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    with pytest.raises(UnknownModel, match=r"neither in \S+/hf/hub nor in \S+/ms; http://127.0.0.1:9 cannot be reached: "):
        checkpoint_of(NAME, environment, QUIET)
    environment["HF_ENDPOINT"] = hub.url
    checkpoint_of(NAME, environment, QUIET)
    (snapshot(tmp_path) / SECOND).unlink()
    hub.files.clear()
    with pytest.raises(CheckpointError, match=f"in part, and the next try goes on: .*snapshots/{COMMIT} lacks {SECOND}: 404"):
        checkpoint_of(NAME, environment, QUIET)


@pytest.mark.parametrize("variables", [("HF_HUB_CACHE", "hub"), ("HUGGINGFACE_HUB_CACHE", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")])
def test_a_cache_is_read_where_its_variables_say(tmp_path, tiny_checkpoint, variables):
    variable, folder = variables
    place = tmp_path / folder / "models--A--b.c" / "snapshots" / "abc"
    shutil.copytree(tiny_checkpoint, place)
    root = tmp_path / "hub" if folder == "hub" else tmp_path
    assert checkpoint_of("A/b.c", {variable: str(root)}, QUIET) == str(place)


@pytest.mark.parametrize("folder", ["models/A/b___c", "A/b___c", "hub/models/A/b___c"])
def test_the_older_cache_of_modelscope_is_read(tmp_path, tiny_checkpoint, folder):
    place = shutil.copytree(tiny_checkpoint, tmp_path / "ms" / folder)
    (place / ".mv").write_text("Revision:master,CreatedAt:1747000000")
    assert checkpoint_of("A/b.c", {"HF_HOME": str(tmp_path), "MODELSCOPE_CACHE": str(tmp_path / "ms")}, QUIET) == str(place)
    assert Origin.of(place) == Origin("A/b.c", "master")


@pytest.mark.parametrize(("name", "revision"), [("A/b.c", "master"), ("A/b.c@v2", "v2"), ("A/b.c", "v2")])
def test_the_cache_of_modelscope_has_snapshots_by_their_branches(tmp_path, tiny_checkpoint, name, revision):
    place = shutil.copytree(tiny_checkpoint, tmp_path / "ms" / "models" / "A--b.c" / "snapshots" / revision)
    assert checkpoint_of(name, {"HF_HOME": str(tmp_path), "MODELSCOPE_CACHE": str(tmp_path / "ms")}, QUIET) == str(place)
    assert Origin.of(place) == Origin("A/b.c", revision)


def test_modelscope_fetches_what_hugging_face_does_not_have(tmp_path, hub, environment, sharded, monkeypatch):
    asked = []

    def snapshot_download(name, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        place = tmp_path / "ms" / "models" / "Eco" / "Tiny"
        shutil.copytree(sharded, place, dirs_exist_ok=True)
        return str(place)

    module = ModuleType("modelscope")
    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "modelscope", module)
    path = checkpoint_of("Eco/Tiny", environment, QUIET)
    assert path == str(tmp_path / "ms" / "models" / "Eco" / "Tiny")
    assert [entry[:2] for entry in asked] == [("Eco/Tiny", None)] * 2
    assert SECOND not in asked[0][2]
    assert SECOND in asked[1][2]


def test_a_name_is_built_generated_from_and_served_by(tmp_path, hub, environment, monkeypatch):
    """The manifest says what it resolved to; a model that is built needs no hub."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    small = ("--prefill", "4", "--max-model-len", "16", "--dtype", "float32", "--backend", "eager", "--buckets", "1")
    result = tiny.cli(tmp_path, "build", NAME, *small)
    assert result.exit_code == 0, result.output
    out = tmp_path / "artifacts" / "Tiny-1.5"
    assert result.stdout == f"{out}\n"
    manifest = Artifact.open(out).manifest
    assert manifest.model["origin"] == {"name": NAME, "revision": COMMIT}
    assert manifest.model["name"] == "Tiny-1.5"
    assert manifest.source_digest.startswith("content:")
    assert manifest.build_arguments[0] == str(snapshot(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    again = tiny.cli(tmp_path, "build", NAME, *small)
    assert "is up to date" in again.stderr
    shutil.rmtree(tmp_path / "hf")
    answer = tiny.cli(tmp_path, "generate", NAME, "--token-ids", "1,2,3", "--max-tokens", "2", "--json")
    assert len(json.loads(answer.stdout)["token_ids"]) == 2
    assert "cannot be reached" in tiny.refused(tmp_path, "generate", "Some-Org/Other", "--token-ids", "1")


def test_plan_fetches_a_configuration_and_quantize_weights(tmp_path, hub, environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    traffic = ("--cards", "1", "--input", "8", "--output", "8", "--concurrency", "1", "--quantization", "bf16", "--json")
    planned = tiny.cli(tmp_path, "plan", NAME, *traffic)
    assert f"fetching the configuration of {NAME}" in planned.stderr
    assert planned.exit_code == 0, planned.output
    assert not list(snapshot(tmp_path).glob("*.safetensors"))
    written = tiny.cli(tmp_path, "quantize", NAME, "--scheme", "w8a8", "--out", tmp_path / "w8a8")
    assert written.exit_code == 0, written.output
    assert open_checkpoint(tmp_path / "w8a8").tensors


def test_serve_builds_what_a_name_stands_for(tmp_path, hub, environment, monkeypatch):
    begun = []

    class Build:
        def __init__(self, arguments, out, environment):
            begun.append((arguments, out))

        def wait_servable(self):
            return None

    monkeypatch.setattr(serving, "BackgroundBuild", Build)
    home = Home(tmp_path, environment)
    serving.find_or_build(home, NAME, RankSettings(), no_build=False, progress=QUIET)
    assert begun == [([str(snapshot(tmp_path))], tmp_path / "artifacts" / "Tiny-1.5")]


def test_a_process_of_its_own_that_is_offline_says_so_at_once(tmp_path):
    places = dict.fromkeys(("HF_HOME", "MODELSCOPE_CACHE", "NPUCOMPILE_HOME"), str(tmp_path))
    command = [sys.executable, "-m", "npucompile.tools.cli", "build", NAME]
    done = subprocess.run(
        command, env={**os.environ, **places, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert f"it is neither in {tmp_path}/hub nor in {tmp_path}; https://huggingface.co cannot be reached: " in done.stderr
    assert "Traceback" not in done.stderr
