"""tools/builder/weights.py: the stored file equals the one safetensors writes, without the whole model in memory."""

from __future__ import annotations

import io

import pytest
from safetensors.torch import save
from support import ranks, tiny
from torch.multiprocessing.reductions import StorageWeakRef

from npucompile.graphs import tree
from npucompile.graphs.ir.trace import signature_of
from npucompile.lowering.artifact.artifact import ArtifactWriter
from npucompile.models import checkpoint, step
from npucompile.models.safetensors_files import TensorEntry
from npucompile.tools import progress
from npucompile.tools.builder.weights import store_weights
from npucompile.tools.progress import Progress

PLANS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "copied heads": {"mesh": "dp=2,tp=2"},
    "w8a8": {"mesh": "dp=2,tp=2", "quantization": "w8a8"},
    "w4a8": {"mesh": "dp=2,tp=2", "quantization": "w4a8"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"), **ranks.SIZES)


def stored(plan, path, shown=tiny.QUIET):
    """Leaves, and the bytes of the file."""
    leaves = signature_of(step.program(plan.model, plan.buckets[0], plan.limits, plan.dtype)).params
    with ArtifactWriter(path) as writer:
        name, digest = store_weights(plan, leaves, writer, shown)
        assert digest.startswith("content:")
        return leaves, (writer.root / name).read_bytes()


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_the_file_is_what_safetensors_writes_of_the_whole_model(tmp_path, model, options):
    plan = tiny.planned(model, **options)
    leaves, data = stored(plan, tmp_path / "made")
    params = checkpoint.load(checkpoint.open_checkpoint(model), plan.model.params(plan.dtype))
    assert data == save({leaf.name: tensor for leaf, (_, tensor) in zip(leaves, tree.flatten(params), strict=True)})


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_one_group_of_tensors_is_in_memory_at_a_time(tmp_path, model, monkeypatch, options):
    """Counts the bytes of all tensors that were read or made and are still referenced, whenever another one is."""
    plan, alive, names, most = tiny.planned(model, **options), {}, [], 0

    def track(tensor):
        nonlocal most
        reference = StorageWeakRef(tensor.untyped_storage())
        alive[reference.cdata] = reference, tensor.untyped_storage().nbytes()
        for key in [key for key, (reference, _) in alive.items() if reference.expired()]:
            del alive[key]
        most = max(most, sum(size for _, size in alive.values()))

    read, read_into = checkpoint.ParamReader.read, TensorEntry.read_into

    def tracked_read(reader, group):
        for position, tensor in read(reader, group):
            track(tensor)
            yield position, tensor
            del tensor

    def tracked_read_into(entry, target, region=None):
        names.append(entry.name)
        track(target)
        read_into(entry, target, region)

    monkeypatch.setattr(checkpoint.ParamReader, "read", tracked_read)
    monkeypatch.setattr(TensorEntry, "read_into", tracked_read_into)
    stored(plan, tmp_path / "made")
    assert len(names) == len(set(names))
    entries = checkpoint.open_checkpoint(model).tensors
    largest = max(
        sum(entries[name].nbytes for name in param.source.names) + param.aval.nbytes
        for _, param in tree.flatten(plan.model.params(plan.dtype))
    )
    total = sum(entry.nbytes for entry in entries.values())
    assert 0 < most <= largest < total / 3


def test_a_large_checkpoint_has_a_progress_bar(tmp_path, model, monkeypatch):
    plan, lines = tiny.planned(model), io.StringIO()
    stored(plan, tmp_path / "small", Progress(lines))
    assert "read weights" not in lines.getvalue()
    monkeypatch.setattr(progress, "BAR_BYTES", 0)
    monkeypatch.setattr(progress, "MB", 1)
    leaves, _ = stored(plan, tmp_path / "large", Progress(lines))
    steps = [line.split()[2] for line in lines.getvalue().splitlines() if line.startswith("read weights")]
    total = sum(leaf.aval.nbytes for leaf in leaves)
    assert steps[-1] == f"{total}/{total}"
    assert 1 < len(steps) == len(set(steps)) <= progress.BAR_STEPS
