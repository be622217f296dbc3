"""Opens the executor of one rank: on this machine's CPU, on an NPU, or on an emulated NPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore

from ...graphs.errors import ArtifactError, SpecError
from ...graphs.types import Bucket, Mesh
from ...lowering.artifact.artifact import Artifact
from ...lowering.artifact.manifest import GraphEntry
from ...lowering.ascend import hccl
from ...lowering.ascend.legality.running import check_running
from ...lowering.ascend.npu import NpuDevice
from ...lowering.ascend.shipped import ShippedGraph, shipped_graph
from ...lowering.collectives_check import EXPERT_GROUPS
from ...lowering.device import CPU, EMULATED, NPU, Device, missing
from ...lowering.platform import Platform
from ...lowering.switches import BUCKETS
from ...runtime.cpu_executor import CpuExecutor
from ...runtime.device_executor import DeviceExecutor
from ...runtime.device_params import LoadParams
from ...runtime.distributed.agreement import Agreement
from ...runtime.distributed.process_groups import MakeGroup, ProcessGroups, gloo
from ...runtime.executor import Executor
from ...runtime.warm_up import BEGINS, CACHED, COMPILED
from ..builder.targets import target
from ..progress import Progress
from .compile_cache import cache_directory, opened, shipped_directory
from .random_weights import random_params
from .rank_settings import RankPlace, RankSettings
from .weights import check_checkpoint, placement_of, rank_params

AUTO = "auto"


def choose_device(artifact: Artifact, requested: str) -> str:
    """The kind of device that runs an artifact: "cpu", "npu" or "emulated".

    Args:
        requested: one of these, or "auto": the kind that the artifact was built for.

    Raises:
        SpecError: the artifact was built for another kind.
        ArtifactError: this machine has none; says what is missing and what runs here instead.
    """
    manifest = artifact.manifest
    kinds = kinds_of(artifact)
    if requested not in (AUTO, *kinds):
        legal = " and ".join((AUTO, *kinds))
        raise SpecError(f"--device {requested}: {artifact.path} was built for {manifest.target}; legal are {legal}")
    kind = kinds[0] if requested == AUTO else requested
    if reason := missing(kind):
        raise ArtifactError(f"{artifact.path} is for {_machine(artifact)}: {reason}; {_rehearsal(artifact)}")
    return kind


def kinds_of(artifact: Artifact) -> tuple[str, ...]:
    """The kinds of device that run an artifact, the one that it was built for first."""
    kind = target(artifact.manifest.target)
    return (CPU,) if kind.local else (NPU, EMULATED)


def settled(artifact: Artifact, settings: RankSettings) -> RankSettings:
    """The settings with the kind of device that runs the artifact in place of "auto", once it is known to have weights there.

    Raises: as `choose_device` and `check_weights`.
    """
    chosen = replace(settings, device=choose_device(artifact, settings.device))
    if chosen.device == CPU and settings.checkpoint:
        raise SpecError(f"--checkpoint is for artifacts for NPUs; {artifact.path} has its weights, for {artifact.manifest.target}")
    if chosen.device == CPU and settings.off:
        raise SpecError(f"--off {', '.join(sorted(settings.off))}: switches are for artifacts for NPUs, {artifact.path} runs on this CPU")
    if chosen.device == CPU and settings.expert_map:
        raise SpecError(f"serve takes --expert-map for artifacts for NPUs; {artifact.path} is for {artifact.manifest.target}: build again")
    placement_of(artifact, settings.expert_map)
    check_weights(artifact, chosen)
    return chosen


def check_weights(artifact: Artifact, settings: RankSettings) -> None:
    """Refuses an artifact that has no weights and is given none.

    Raises:
        ArtifactError: saying where weights can come from.
    """
    manifest = artifact.manifest
    if manifest.weights is not None or (settings.device != CPU and (settings.checkpoint or manifest.checkpoint or settings.random_weights)):
        return
    if settings.device == CPU:
        raise ArtifactError(f"{artifact.path} was built without weights: it can be inspected, and not run; build a checkpoint directory")
    where = "name a checkpoint of the model with --checkpoint DIR"
    raise ArtifactError(f"{artifact.path} was built without weights: {where}; {_rehearsal(artifact)}")


def load_executor(
    artifact: Artifact, settings: RankSettings, stack: ExitStack, progress: Progress, place: RankPlace | None = None
) -> Executor:
    """Loads a rank's part of an artifact; called on the thread that is to run its steps.

    Args:
        settings: `device` is what `choose_device` returned.
        stack: closed after the last step; frees what was opened here.
        progress: shows what takes long; quiet on all ranks but 0.
        place: of this rank; None for an artifact of one device.

    Raises:
        ArtifactError: it cannot run here, or its weights are not those that it was built for.
        CheckpointError: the checkpoint cannot be used.
        LoweringError: the device refuses it.
        RankError: the ranks of a group do not connect.
    """
    rank, local_rank = (place.rank, place.local_rank) if place else (0, 0)
    if BUCKETS in settings.off:
        artifact = with_few_buckets(artifact, settings.bucket)
    artifact = without_buckets(artifact, settings.without)
    if settings.device == CPU:
        if place:
            stack.enter_context(ProcessGroups(place.mesh, rank, place.store, place.address, settings.step_limit_s))
        return CpuExecutor(artifact, rank=rank if place else None)
    device = settings.open_device(settings.device, local_rank)
    stack.callback(device.close)
    platform = Platform.of(artifact.manifest.platform)
    check_running(device.version, platform, [partial(_graph, artifact, entry) for entry in artifact.manifest.graphs if entry.compiled])
    device.load_packages(platform.packages)
    communicators = _communicators(artifact, device, settings, stack, place) if place else {}
    if settings.before_loading and place:
        settings.before_loading(artifact, device, place, communicators)
    if local_rank == 0 and not settings.random_weights:
        # Once a machine: it reads as much as the digest covers.
        check_checkpoint(artifact, settings.checkpoint)
    with progress.bar(f"compile for {device.name}", len(artifact.manifest.graphs)) as bar:

        def report(bucket: Bucket, seconds: float, outcome: str) -> None:
            if outcome == BEGINS:
                bar.begin(bucket.name)
                return
            warm = outcome in (COMPILED, CACHED)
            text = f"{outcome}, {device.used_bytes() / 2**20:,.0f} MiB in use" if warm else f"cannot run: {outcome}"
            bar.step(f"{bucket.name} {seconds:.1f} s, {text}")

        return DeviceExecutor(
            artifact,
            device,
            params_of(artifact, settings, rank, progress),
            rank=rank,
            communicators=communicators,
            cache_dir=_cache_dir(artifact, settings, device),
            step_timeout_s=settings.step_limit_s,
            report=report,
            agree=Agreement(PrefixStore("start", place.store), rank, place.mesh.size) if place else (lambda reason, limit_s: reason),
            off=settings.off,
        )


def with_few_buckets(artifact: Artifact, bucket: str = "") -> Artifact:
    """The artifact with the largest bucket of each kind alone, which all requests fit, and with the one of that name."""
    graphs = artifact.manifest.graphs
    by_size = sorted((entry.bucket for entry in graphs), key=lambda bucket: (bucket.batch * bucket.q_len, bucket))
    largest = {each.kind: each for each in by_size}.values()
    kept = tuple(entry for entry in graphs if entry.bucket in largest or entry.bucket.name == bucket)
    return Artifact(artifact.path, replace(artifact.manifest, graphs=kept), artifact.digest)


def without_buckets(artifact: Artifact, names: Collection[str]) -> Artifact:
    """The artifact without buckets of these names, but for those of kinds that have no others: no request could be served."""
    graphs = artifact.manifest.graphs
    served = {entry.bucket.kind for entry in graphs if entry.bucket.name not in names}
    kept = tuple(entry for entry in graphs if entry.bucket.name not in names or entry.bucket.kind not in served)
    return Artifact(artifact.path, replace(artifact.manifest, graphs=kept), artifact.digest)


def _graph(artifact: Artifact, entry: GraphEntry) -> ShippedGraph:
    graph = shipped_graph(artifact, entry)
    assert graph is not None, entry.bucket
    return graph


def _cache_dir(artifact: Artifact, settings: RankSettings, device: Device) -> Path | None:
    if settings.ship_compiled:
        return opened(shipped_directory(artifact.path, device.version))
    return opened(cache_directory(artifact.path, settings.cache, device.version)) if settings.cache else None


def params_of(artifact: Artifact, settings: RankSettings, rank: int, progress: Progress) -> LoadParams:
    """What reads the parameters of a rank, or draws them."""
    if settings.random_weights:
        return random_params(artifact, rank)
    placement = placement_of(artifact, settings.expert_map)
    return lambda wanted: rank_params(artifact, rank, checkpoint=settings.checkpoint, wanted=wanted, progress=progress, placement=placement)


def _communicators(artifact: Artifact, device: Device, settings: RankSettings, stack: ExitStack, place: RankPlace) -> Mapping[str, str]:
    """Makes the process groups that the artifact's graphs name, and the device's communicators over them."""
    manifest = artifact.manifest
    collectives = [collective for entry in manifest.graphs for collective in entry.collectives]
    # GE's kernels of both exchanges of experts want communicators that nothing else uses (lowering/ascend/ge_file.py).
    symbols = {EXPERT_GROUPS.get(name, group) for name, group, _ in collectives}
    groups = ProcessGroups(
        place.mesh,
        place.rank,
        place.store,
        place.address,
        settings.step_limit_s,
        symbols=symbols,
        make_group=_group_maker(device, manifest.communicator_bytes),
    )
    return device.communicators(stack.enter_context(groups).groups, place.rank)


def _group_maker(device: Device, communicator_bytes: Mapping[str, int]) -> MakeGroup:
    """What ranks communicate with: HCCL between NPUs, gloo between emulated devices; by size of one buffer by symbol."""
    return hccl.group_maker(device.torch_npu, communicator_bytes) if isinstance(device, NpuDevice) else gloo


def _machine(artifact: Artifact) -> str:
    ranks = Mesh.parse(artifact.manifest.mesh).size
    return f"{ranks} NPU{'s' * (ranks > 1)} of {artifact.manifest.target}"


def _rehearsal(artifact: Artifact) -> str:
    """What runs here in place of an artifact for NPUs."""
    manifest = artifact.manifest
    if manifest.weights is not None or manifest.checkpoint is not None:
        return "--device emulated runs it on this CPU by interpreting its graphs, which is meant for small models"
    # A preset's sizes are too large to interpret, and nobody has its weights on a laptop.
    build = f"build SMALL --target {manifest.target} --mesh {manifest.mesh} --quantization {manifest.quantization}"
    return (
        f"what runs here is a small model of the same layers: `npucompile models {manifest.build_arguments[0]} --reduce SMALL`, "
        f"`npucompile {build}`, `npucompile serve SMALL --device emulated`"
    )
