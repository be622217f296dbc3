"""A random checkpoint of two layers, plans and a stand-in compiler for it, artifacts that are changed on purpose."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from npucompile.graphs import tree
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.spmd.partition import Partitioned
from npucompile.graphs.types import Bucket, Limits
from npucompile.lowering import backend as backend_table
from npucompile.lowering.artifact.artifact import Artifact, ArtifactWriter, Compiled, GraphEntry, Manifest
from npucompile.lowering.backend import Backend
from npucompile.lowering.backends import eager
from npucompile.lowering.lower import Lowered
from npucompile.models import checkpoint, registry
from npucompile.models.params import initialise
from npucompile.runtime.buckets import Row, pack
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.executor import Executor, Inputs, Outputs, Pending
from npucompile.tools.build import driver, pool, stages, targets
from npucompile.tools.build.plan import Options, Plan, plan
from npucompile.tools.cli import main
from npucompile.tools.progress import Progress
from npucompile.tools.verify import compare

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "vocab_size": 260, "hidden_size": 32,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "eos_token_id": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
NPU_SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 1024,
}  # fmt: skip
"""Changes to it that four NPUs can share and their kernels' packed weights can hold."""

VOCAB, EOS = 260, 256
BUCKETS, PREFILL, CONTEXT = (1, 2, 4), (4, 16), 64
AGREEMENT = 40.0
"""How much the last token outweighs all before it: of ten drafts about four are right, and greedy streams do not all run in circles."""
UNTAKEN = -(10**6)
"""What a poisoned request slot holds: no token, and no place."""
QUIET = Progress(quiet=True)


def write_checkpoint(directory: Path, seed: int = 0, tokenizer: bool = True, agreeing: bool = False, **changes: Any) -> Path:
    """A checkpoint in the layout of Hugging Face, with a byte-level tokenizer: ids below 256 are bytes.

    A drawn draft head is as good as never right; an agreeing one is now and then.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (directory / "config.json").write_text(json.dumps(config))
    model, generator = registry.from_config(directory.name, config), torch.Generator().manual_seed(seed)
    params = model.family.abstract_params(model.config, torch.float32)
    noisy: dict[str, Any] = {}
    # The draft head last: with it and without it the same seed gives the same layers.
    for part in (model.params(torch.float32), {name: params[name] for name in params if name == model.family.draft_key}):
        drawn = initialise(part, generator)
        # Away from zeros and ones, so that no parameter can be dropped without a change of tokens.
        noisy |= tree.map_leaves(lambda t: t + 0.2 * torch.randn(t.shape, generator=generator), drawn)
    if agreeing:
        _agree(noisy, noisy[model.family.draft_key])
    checkpoint.save(params, noisy, directory)
    if tokenizer:
        table = Tokenizer(models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
        table.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        table.decoder = decoders.ByteLevel()
        table.save(str(directory / "tokenizer.json"))
    return directory


def _agree(weights: dict[str, Any], head: dict[str, Any]) -> None:
    """Lets the next token follow mostly from the last one, to the model and to its draft head."""
    weights["embed"] *= AGREEMENT
    head["fc"][:, : len(head["fc"])] += AGREEMENT * torch.eye(len(head["fc"]))
    head["norm_embedding"].zero_()
    head["norm"].copy_(weights["norm"])


def planned(model: Path, **options: Any) -> Plan:
    """A plan whose every size is small; `options` are fields of Options."""
    sizes = {"buckets": BUCKETS, "prefill": PREFILL, "max_model_len": CONTEXT, "dtype": "float32", "backend": "eager"}
    return plan(Options(str(model), **{**sizes, **options}))


def built(made: Plan, out: Path, *, fresh: bool = False, progress: Progress = QUIET) -> driver.BuildReport:
    """Builds in this process, one job at a time, and leaves torch's thread count alone; `fresh` traces what was traced before."""
    threads = torch.get_num_threads()
    try:
        with mock.patch.object(driver, "stage", stages.stage if fresh else stage_once):
            return driver.build(made, out, out.parent / "cache", progress, jobs=1)
    finally:
        torch.set_num_threads(threads)


_STAGED: dict[object, stages.Staged] = {}


def stage_once(made: Plan, bucket: Bucket) -> stages.Staged:
    """`stages.stage`, which is a function of its arguments, called once for equal ones; most tests are not about tracing."""
    what = (made.source.text, made.model.config, made.backend, made.dtype, made.limits, made.max_logprobs)
    key = (*what, made.mesh, made.target.name, bucket)
    if key not in _STAGED:
        _STAGED[key] = stages.stage(made, bucket)
    return _STAGED[key]


def planned_device(model: Path, **options: Any) -> Plan:
    """A plan for four NPUs whose every size is small; `options` are fields of Options."""
    place = {"target": "ascend-a3", "mesh": "dp=2,tp=2", "num_speculative_tokens": 1}
    sizes = {"buckets": (2, 4), "prefill": (4,), "max_model_len": 256, "max_num_seqs": 4}
    return plan(Options(str(model), **{**place, **sizes, **options}))


_COMPILED: dict[object, pool.CompileResult] = {}
_compile = pool.run


def compile_once(job: pool.CompileJob) -> pool.CompileResult:
    """`pool.run`, whose result is decided by the facts of its bucket, called once for equal ones; most tests are not about lowering."""
    key = repr(driver.facts(job.plan, job.bucket))
    if key not in _COMPILED:
        _COMPILED[key] = quietly(_compile, replace(job, known_key=""))
    result = _COMPILED[key]
    known = result.staged is not None and result.staged.key == job.known_key
    return replace(result, job=job, compiled=None if known else result.compiled)


def quietly(run: Callable[[pool.CompileJob], pool.CompileResult], job: pool.CompileJob) -> pool.CompileResult:
    """Compiles in this process as one of the pool's does, and leaves torch's threads and log as they were."""
    threads, level = torch.get_num_threads(), logging.getLogger("torch").level
    try:
        return run(job)
    finally:
        torch.set_num_threads(threads)
        logging.getLogger("torch").setLevel(level)


class Stub(Backend):
    """A backend that takes eager graphs for machine code.

    Attributes:
        compiled: bucket names it was asked for, in order.
        error: what its executables add to logits.
        refuses: substring of the names it refuses.
        version: part of its options; another one is another compiler.
    """

    name = "stub"
    suffix = "stub"

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.error = 0.0
        self.refuses: str | None = None
        self.version = 1

    def install(self, monkeypatch: Any) -> Stub:
        """Makes it known under its name, in this process, as a backend for this machine."""
        names = (*backend_table.backend_names(), self.name)
        module = ModuleType(f"npucompile.lowering.backends.{self.name}")
        module.BACKEND = self  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(backend_table, "backend_names", lambda: names)
        here = targets.target("cpu")
        monkeypatch.setitem(targets._TARGETS, "cpu", replace(here, backends=(*here.backends, self.name)))
        return self

    def lower(self, partitioned: Partitioned) -> Lowered:
        return eager.BACKEND.lower(partitioned)

    def options(self, threads: int) -> dict[str, Any]:
        return {"threads": threads, "version": self.version}

    def compile(self, lowered: Lowered, *, cache_dir: Path, threads: int) -> backend_table.Compiled:
        name = lowered.bucket.name
        self.compiled.append(name)
        if self.refuses and self.refuses in name:
            raise LoweringError(f"the stub does not like {name}")
        return eager.BACKEND.compile(lowered, cache_dir=cache_dir, threads=threads)

    def open(self, path: Path, place: backend_table.Place) -> Any:
        run, stub = eager.BACKEND.open(path, place), self

        class Executable:
            backend = stub.name

            def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                return [result + stub.error if result.shape[-1] == VOCAB else result for result in run(operands)]

        return Executable()


def cli(home: Path, *arguments: object) -> Result:
    """Runs `npucompile` in this process; any end but a refusal in its own words is an error of the test."""
    with mock.patch.object(driver, "stage", stage_once):
        result = CliRunner().invoke(main, [str(argument) for argument in arguments], env={"NPUCOMPILE_HOME": str(home)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(home: Path, *arguments: object) -> str:
    """What `npucompile` says on standard error as it exits with 1."""
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
        return replace(entry, compiled=Compiled(name, entry.eager, entry.digest)) if wanted else entry

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
    """Every file of a directory, hidden ones too."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def run_row(executor: Executor, bucket: Bucket, row: Row) -> Outputs:
    """Runs a step whose only live row is this one."""
    (outputs,) = executor.launch(bucket, [pack(bucket, [row], executor.limits, max_logprobs=executor.max_logprobs)]).result()
    return outputs


class Narrowed:
    """An executor with some of its buckets, and perhaps fewer pages and slots than its pools have."""

    groups, run_ahead = 1, 0

    def __init__(self, executor: CpuExecutor, buckets: Sequence[Bucket], **limits: int) -> None:
        self.executor, self.buckets = executor, tuple(buckets)
        self.limits: Limits = replace(executor.limits, **limits)
        self.vocab_size, self.max_logprobs, self.backends = executor.vocab_size, executor.max_logprobs, executor.backends
        self.refresh, self.compiles = executor.refresh, executor.compiles

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> Pending:
        assert bucket in self.buckets
        return self.executor.launch(bucket, inputs)


class Launching:
    """An executor that runs the steps of another one in a thread of its own, in the order in which they are launched.

    Attributes:
        most_in_flight: most steps launched whose outcome nobody had read.
    """

    groups, run_ahead = 1, 1

    def __init__(self, executor: Executor) -> None:
        self.executor, self.limits, self.buckets = executor, executor.limits, executor.buckets
        self.vocab_size, self.max_logprobs, self.backends = executor.vocab_size, executor.max_logprobs, executor.backends
        self.refresh, self.compiles = executor.refresh, executor.compiles
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
    """A step that runs, or waits for its turn."""

    launching: Launching
    outcome: Future[Sequence[Outputs]]

    def result(self) -> Sequence[Outputs]:
        self.launching.read()
        return self.outcome.result()


def poison(executor: CpuExecutor) -> None:
    """Fills state pools with NaN and request slots with what no step can start from: a request must see only what it wrote itself."""
    for leaf, tensor in zip(executor.artifact.manifest.state, executor._state, strict=True):
        if compare.is_request_slots(leaf):
            # The null request slot is what rows of padding start from.
            tensor[1:] = UNTAKEN
        else:
            tensor.fill_(float("nan"))


@contextlib.contextmanager
def damaged(path: Path) -> Iterator[Path]:
    """A file with one bit flipped, put right afterwards."""
    data = path.read_bytes()
    tampered(path)
    try:
        yield path
    finally:
        path.write_bytes(data)
