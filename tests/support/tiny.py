"""A random checkpoint of two layers, its build plans, a stub backend, and ways to change an artifact."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from click.testing import CliRunner, Result
from support.texts import byte_tokenizer

from npucompile.graphs import tree
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.spmd.partition import PartitionedProgram
from npucompile.graphs.types import Bucket, Limits
from npucompile.lowering import backend as backend_table
from npucompile.lowering.artifact.artifact import Artifact, ArtifactWriter, GraphEntry, Manifest
from npucompile.lowering.artifact.checked import NAME as CHECKED
from npucompile.lowering.artifact.manifest import ExecutableRecord
from npucompile.lowering.backend import Backend
from npucompile.lowering.backends import eager
from npucompile.lowering.lower import LoweredProgram
from npucompile.lowering.platform import CPU, Platform
from npucompile.models import checkpoint, registry
from npucompile.models.params import initialise
from npucompile.models.quant.declare import stored
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.executor import Executor, FinishedStep, Inputs, Outputs, Pending
from npucompile.runtime.steps.pack import pack
from npucompile.runtime.steps.rows import Row
from npucompile.tools.agreement.pools import is_request_slots
from npucompile.tools.builder import driver, pool, stages, targets
from npucompile.tools.builder.describe import describe
from npucompile.tools.builder.plan import Options, Plan, plan
from npucompile.tools.cli import main
from npucompile.tools.commands import build
from npucompile.tools.notation import PrefillSize
from npucompile.tools.progress import Progress

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "vocab_size": 260, "hidden_size": 32,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "eos_token_id": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
NO_RECURRENT: dict[str, Any] = dict.fromkeys(name for name in CONFIG if name.startswith(("linear_", "layer_types", "shared_", "mtp_")))
"""Changes to CONFIG that leave out what models without recurrent layers lack."""
NPU_SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 1024,
}  # fmt: skip
"""Changes to CONFIG that four NPUs can share and whose packed weights fit their kernels."""

VOCAB, EOS = 260, 256
BUCKETS, PREFILL, CONTEXT = (1, 2, 4), (4, 16), 64
AGREEMENT = 40.0
"""Weight of the last token against all before it; about four of ten drafts are right, and greedy streams do not all become periodic."""
UNTAKEN = -(10**6)
"""Content of a poisoned request slot: neither a token nor a position."""
QUIET = Progress(quiet=True)


def write_checkpoint(directory: Path, seed: int = 0, tokenizer: bool = True, agreeing: float = 0, **changes: Any) -> Path:
    """A checkpoint in the layout of Hugging Face, with a byte-level tokenizer: ids below 256 are bytes.

    A random draft head is almost never right; with `agreeing`, a weight, it sometimes is.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    model, generator = registry.from_config(directory.name, config), torch.Generator().manual_seed(seed)
    params = stored(model.family.abstract_params(model.config, torch.float32), model.config.variant)
    noisy: dict[str, Any] = {}
    # The draft head last: with it and without it the same seed gives the same layers.
    for part in (model.params(torch.float32), {name: params[name] for name in params if name == model.family.draft_key}):
        drawn = initialise(part, generator)
        # Noise on initial zeros and ones, so that a dropped parameter would change the tokens.
        noisy |= tree.map_leaves(lambda t: t + 0.2 * torch.randn(t.shape, generator=generator), drawn)
    if agreeing:
        _agree(noisy, noisy[model.family.draft_key], 1 - model.config.norm_offset, agreeing * AGREEMENT)
    checkpoint.save(params, noisy, directory)
    if tokenizer:
        byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def _agree(weights: dict[str, Any], head: dict[str, Any], one: float, weight: float) -> None:
    """Changes weights so that in the model and in its draft head the next token depends mostly on the last one.

    Args:
        one: weight of a norm that scales nothing.
        weight: of the last token against all before it.
    """
    weights["embed"] *= weight
    head["fc"][:, : len(head["fc"])] += weight * torch.eye(len(head["fc"]))
    head["norm_embedding"].fill_(one)
    head["norm"].copy_(weights["norm"])


def planned(model: Path, **options: Any) -> Plan:
    """A plan with small sizes; `options` are fields of Options."""
    sizes = {
        "buckets": BUCKETS,
        "prefill": PREFILL,
        "max_model_len": CONTEXT,
        "dtype": "float32",
        "backend": "eager",
        "checkpoint_slots": 0,
    }
    return plan(Options(str(model), **prefill_sized({**sizes, **options})))


def prefill_sized(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with sizes of chunks that are given as numbers of tokens as those of one prompt."""
    chunks = {name: options[name] for name in ("prefill", "score") if options.get(name)}
    return options | {name: tuple(PrefillSize(size) if isinstance(size, int) else size for size in sizes) for name, sizes in chunks.items()}


def built(new_plan: Plan, out: Path, *, fresh: bool = False, progress: Progress = QUIET) -> driver.BuildReport:
    """Builds in this process, one job at a time, and restores torch's thread count; `fresh` traces again instead of reusing stages."""
    threads = torch.get_num_threads()
    try:
        with mock.patch.object(driver, "stage", stages.stage if fresh else stage_once):
            return driver.build(new_plan, out, out.parent / "cache", progress, jobs=1)
    finally:
        torch.set_num_threads(threads)


def options_of(arguments: Sequence[str]) -> Options:
    """What `npucompile build ARGUMENTS` asks for."""
    params = build.command.make_context("build", list(arguments)).params
    return Options(**{name: params[name] for name in Options.__dataclass_fields__})


def without_graphs(planned: Plan, out: Path) -> Artifact:
    """The artifact of a plan before anything is staged."""
    with ArtifactWriter(out) as writer:
        writer.publish(describe(planned, writer, QUIET))
    return Artifact.open(out)


def described(new_plan: Plan) -> Manifest:
    """The manifest of a plan, without graphs; its weights, where the plan stores them, are gone afterwards."""
    with tempfile.TemporaryDirectory() as directory, ArtifactWriter(Path(directory) / "artifact") as writer:
        return describe(new_plan, writer, QUIET)


_STAGED: dict[object, stages.Staged] = {}


def stage_once(new_plan: Plan, bucket: Bucket) -> stages.Staged:
    """`stages.stage`, cached by its arguments, because most tests are not about tracing."""
    what = (new_plan.source.text, new_plan.model.config, new_plan.backend, new_plan.dtype, new_plan.limits, new_plan.max_logprobs)
    key = (*what, new_plan.mesh, new_plan.target.name, bucket)
    if key not in _STAGED:
        _STAGED[key] = stages.stage(new_plan, bucket)
    return _STAGED[key]


def planned_device(model: Path, **options: Any) -> Plan:
    """A plan for four NPUs with small sizes; `options` are fields of Options."""
    place = {"target": "ascend-a3", "mesh": "dp=2,tp=2", "num_speculative_tokens": 1}
    sizes = {"buckets": (2, 4), "prefill": (4,), "max_model_len": 256, "max_num_seqs": 4, "logit_adjustments": 2}
    return plan(Options(str(model), **prefill_sized({**place, **sizes, **options})))


_COMPILED: dict[object, pool.CompileResult] = {}
_compile = pool.run


def compile_once(job: pool.CompileJob) -> pool.CompileResult:
    """`pool.run`, cached by the facts of its bucket, because most tests are not about lowering."""
    key = repr(driver.facts(job.plan, job.bucket))
    if key not in _COMPILED:
        _COMPILED[key] = quietly(_compile, replace(job, known_key=""))
    result = _COMPILED[key]
    known = result.staged is not None and result.staged.key == job.known_key
    return replace(result, job=job, compiled=None if known else result.compiled)


def quietly(run: Callable[[pool.CompileJob], pool.CompileResult], job: pool.CompileJob) -> pool.CompileResult:
    """Compiles in this process instead of a worker, and restores torch's thread count and log level."""
    threads, level = torch.get_num_threads(), logging.getLogger("torch").level
    try:
        return run(job)
    finally:
        torch.set_num_threads(threads)
        logging.getLogger("torch").setLevel(level)


class Stub(Backend):
    """A backend whose executables are eager graphs.

    Attributes:
        compiled: names of the buckets that it compiled, in order.
        error: number that its executables add to logits, where their rows are `wrong`; None is any number of rows.
        refuses: substring of the names of buckets that it refuses.
        version: part of its options, as of a compiler.
    """

    name = "stub"
    suffix = "stub"

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.error, self.wrong = 0.0, None
        self.refuses: str | None = None
        self.version = 1

    def install(self, monkeypatch: Any) -> Stub:
        """Registers it in this process, under its name, as a backend for this machine."""
        names = (*backend_table.backend_names(), self.name)
        module = ModuleType(f"npucompile.lowering.backends.{self.name}")
        module.BACKEND = self  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(backend_table, "backend_names", lambda: names)
        here = targets.target("cpu")
        monkeypatch.setitem(targets._TARGETS, "cpu", replace(here, backends=(*here.backends, self.name)))
        return self

    def lower(self, partitioned: PartitionedProgram, platform: Platform = CPU) -> LoweredProgram:
        return eager.BACKEND.lower(partitioned)

    def options(self, threads: int) -> dict[str, Any]:
        return {"threads": threads, "version": self.version}

    def compile(self, lowered: LoweredProgram, *, cache_dir: Path, threads: int) -> backend_table.CompiledFile:
        name = lowered.bucket.name
        self.compiled.append(name)
        if self.refuses and self.refuses in name:
            raise LoweringError(f"the stub does not like {name}")
        return eager.BACKEND.compile(lowered, cache_dir=cache_dir, threads=threads)

    def open(self, path: Path) -> Any:
        run, stub = eager.BACKEND.open(path), self

        class Executable:
            backend = stub.name

            def prepare(self, params: Sequence[torch.Tensor]) -> tuple[int, ...]:
                return run.prepare(params)

            def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                results = run(operands)
                wrong = stub.wrong in (None, len(results[0]))
                return [result + stub.error if wrong and result.shape[-1] == VOCAB else result for result in results]

        return Executable()


def cli(home: Path, *arguments: object) -> Result:
    """Runs `npucompile` in this process; an exception that the command does not turn into a message fails the test."""
    with mock.patch.object(driver, "stage", stage_once):
        result = CliRunner().invoke(main, [str(argument) for argument in arguments], env={"NPUCOMPILE_HOME": str(home)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(home: Path, *arguments: object) -> str:
    """The message of `npucompile` on standard error, when it exits with 1."""
    result = cli(home, *arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return str(result.stderr)


def published(path: Path, change: Callable[[Manifest, ArtifactWriter], Manifest]) -> Artifact:
    """Publishes a changed manifest over the same files, digests and all, as a builder would."""
    with ArtifactWriter(path) as writer:
        assert writer.previous is not None
        before = writer.previous.manifest
        assert all(writer.keep(name) for name in before.files)
        writer.publish(change(before, writer))
    return Artifact.open(path)


def with_compiled(path: Path, name: str = "eager", buckets: Sequence[str] | None = None, **fields: Any) -> Artifact:
    """Publishes eager graphs as executables of backend `name`, for some buckets or all; `fields` change the manifest."""

    def compiled(entry: GraphEntry) -> GraphEntry:
        wanted = buckets is None or entry.bucket.name in buckets
        return replace(entry, compiled=ExecutableRecord(name, entry.eager, entry.digest)) if wanted else entry

    return published(path, lambda before, _: replace(before, graphs=tuple(map(compiled, before.graphs)), **fields))


def copied(path: Path, to: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(path, to)
    return to


def tampered(file: Path) -> None:
    """Flips one bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a directory, hidden ones too, but for what says that others were read."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file() and file.name != CHECKED}


def run_row(executor: Executor, bucket: Bucket, row: Row) -> Outputs:
    """Runs a step with one live row."""
    (outputs,) = executor.launch(bucket, [pack(bucket, [row], executor.limits, max_logprobs=executor.max_logprobs)]).result()
    return outputs


class Narrowed:
    """Another executor restricted to some of its buckets, and to `limits`."""

    run_ahead = 0

    def __init__(self, executor: Executor, buckets: Sequence[Bucket], **limits: int) -> None:
        self.executor, self.buckets, self.groups = executor, tuple(buckets), executor.groups
        self.limits: Limits = replace(executor.limits, **limits)
        self.vocab_size, self.max_logprobs, self.backends = executor.vocab_size, executor.max_logprobs, executor.backends
        self.refresh, self.compiles, self.missing = executor.refresh, executor.compiles, executor.missing
        self.max_ranked, self.recurrent, self.fixed_tokens = executor.max_ranked, executor.recurrent, executor.fixed_tokens
        self.segments, self.any_size = executor.segments, executor.any_size

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> Pending:
        assert bucket in self.buckets
        return self.executor.launch(bucket, inputs)


class Groups(Narrowed):
    """Executors of one artifact as dp groups of one, which run every step together."""

    def __init__(self, *executors: Any) -> None:
        super().__init__(executors[0], executors[0].buckets)
        self.groups, self.executors = len(executors), executors

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> Pending:
        outputs = [executor.launch(bucket, [own]).result() for executor, own in zip(self.executors, inputs, strict=True)]
        return FinishedStep([own for (own,) in outputs])


class Launching:
    """An executor that runs another one's steps in a separate thread, in the order in which they are launched.

    Attributes:
        most_in_flight: largest number of launched steps whose result had not been read.
    """

    run_ahead = 1

    def __init__(self, executor: Executor) -> None:
        self.executor, self.limits, self.buckets, self.groups = executor, executor.limits, executor.buckets, executor.groups
        self.vocab_size, self.max_logprobs, self.backends = executor.vocab_size, executor.max_logprobs, executor.backends
        self.refresh, self.compiles, self.missing = executor.refresh, executor.compiles, executor.missing
        self.max_ranked, self.recurrent, self.fixed_tokens = executor.max_ranked, executor.recurrent, executor.fixed_tokens
        self.segments, self.any_size = executor.segments, executor.any_size
        self.most_in_flight = self._in_flight = 0
        self._thread = ThreadPoolExecutor(1)

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> Launched:
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        return Launched(self, self._thread.submit(lambda: self.executor.launch(bucket, inputs).result()))

    def read(self) -> None:
        self._in_flight -= 1

    def __enter__(self) -> Launching:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()


class Launched(NamedTuple):
    """A step that is running or queued."""

    launching: Launching
    outcome: Future[Sequence[Outputs]]

    def result(self) -> Sequence[Outputs]:
        self.launching.read()
        return self.outcome.result()


def poison(executor: CpuExecutor) -> None:
    """Fills state pools with NaN and request slots with impossible values, so that a request that reads what it did not write fails."""
    for leaf, tensor in zip(executor.artifact.manifest.state, executor._state, strict=True):
        if is_request_slots(leaf):
            # Padding rows start from the null request slot.
            tensor[1:] = UNTAKEN
        else:
            tensor.fill_(float("nan"))


@contextlib.contextmanager
def damaged(path: Path) -> Iterator[Path]:
    """A file with one bit flipped, restored afterwards."""
    data = path.read_bytes()
    tampered(path)
    try:
        yield path
    finally:
        path.write_bytes(data)
