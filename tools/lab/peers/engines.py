"""The engines that we are measured beside: how each is found, started and given a checkpoint."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ....graphs.errors import SpecError

HERE = Path(__file__).parent
CONVERTER = "convert_hf_to_gguf.py"

QUIET = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables of every child: nothing is asked of a hub, and torch does not load an accelerator's plugin."""


@dataclass(frozen=True)
class EnginePeer:
    """One engine.

    Attributes:
        name: as in `--peer`.
        adapter: file in adapters/.
        install: what its Python environment needs, in words for a message.
        weights: format of its weights by the artifact's dtype; empty if it reads the checkpoint as it is.
        variables: of its process, with `{cores}` for the numbers of the cores it may use.
    """

    name: str
    adapter: str
    install: str
    weights: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment_name(self) -> str:
        """The name in `--peer-python`, which the variants of an engine share."""
        return self.name.partition("-")[0]

    def command(self, python: str) -> list[str]:
        """Starts its process."""
        # Isolated from this directory, whose modules may be named as an engine's, and from PYTHONPATH.
        return [python, "-I", str(HERE / "loop.py"), str(HERE / "adapters" / self.adapter)]

    def environment(self, base: Mapping[str, str], threads: int) -> dict[str, str]:
        """Variables of its process."""
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
        own = {name: value.format(cores=cores) for name, value in self.variables.items()}
        return {**base, **QUIET, "OMP_NUM_THREADS": str(threads), **own}

    def format_of(self, dtype: str) -> str | None:
        """The format its weights are converted to; None if it reads the checkpoint.

        Raises:
            SpecError: it has none for this dtype.
        """
        if not self.weights:
            return None
        if dtype not in self.weights:
            raise SpecError(f"{self.name} has no weights like {dtype}; legal are {', '.join(self.weights)}")
        return self.weights[dtype]


_LLAMA_CPP = "pip install llama-cpp-python, and what requirements/requirements-convert_hf_to_gguf.txt of llama.cpp names"
# optimum-intel 2.2.0 takes no later transformers, and says so only when it converts.
_OPENVINO = "pip install openvino-genai optimum-intel 'transformers<5.3'"

PEERS = {
    peer.name: peer
    for peer in (
        EnginePeer("llama.cpp", "llama_cpp.py", _LLAMA_CPP, {"bf16": "bf16", "f32": "f32"}),
        EnginePeer("openvino", "openvino.py", _OPENVINO, {"bf16": "fp16", "f32": "fp32"}),
        EnginePeer(
            "vllm",
            "vllm.py",
            "pip install vllm, in a build for CPUs",
            variables={
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_NO_USAGE_STATS": "1",
            },
        ),
        EnginePeer("transformers", "transformers.py", "pip install transformers torch"),
        EnginePeer("llama.cpp-q8_0", "llama_cpp.py", _LLAMA_CPP, {"bf16": "q8_0", "f32": "q8_0"}),
        EnginePeer("openvino-int8", "openvino.py", _OPENVINO, {"bf16": "int8", "f32": "int8"}),
    )
}

DEFAULT = ("llama.cpp", "openvino", "vllm", "transformers")
"""Those measured where none is named; the others have 8-bit weights."""


def named(names: Sequence[str]) -> tuple[EnginePeer, ...]:
    """The engines of `--peer`, each once; those of DEFAULT if there are no names.

    Raises:
        SpecError: a name is unknown.
    """
    for name in names:
        if name not in PEERS:
            raise SpecError(f"--peer {name!r} is unknown; legal are {', '.join(PEERS)}")
    return tuple(PEERS[name] for name in dict.fromkeys(names or DEFAULT))


def interpreters(words: Sequence[str]) -> dict[str, str]:
    """Reads `--peer-python NAME=PATH`; returns the paths by name.

    Raises:
        SpecError: a word is something else, or no interpreter is there.
    """
    legal = tuple(dict.fromkeys(peer.environment_name for peer in PEERS.values()))
    paths: dict[str, str] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or name not in legal:
            raise SpecError(f"--peer-python is {word!r}; legal is NAME=PATH, where NAME is one of {', '.join(legal)}")
        if shutil.which(path) is None:
            raise SpecError(f"--peer-python {name} names {path}, where there is no interpreter; legal is the path of one")
        paths[name] = path
    return paths


def candidates(peer: EnginePeer, given: Mapping[str, str], search_path: str | None, environments: Path) -> tuple[str, ...]:
    """Interpreters that may have an engine: the one that is named, else that of its environment, else our own and the one on PATH.

    Args:
        environments: directory of virtual environments by the name in `--peer-python`.
    """
    if path := given.get(peer.environment_name):
        return (path,)
    if (own := environments / peer.environment_name / "bin" / "python").exists():
        return (str(own),)
    found = shutil.which("python3", path=search_path)
    return tuple(dict.fromkeys(path for path in (sys.executable, found) if path))


def conversion(peer: EnginePeer, python: str, checkpoint: Path, out: Path, kind: str, llama_cpp: Path | None) -> list[str]:
    """The command that writes a checkpoint in an engine's own format.

    Raises:
        SpecError: it is llama.cpp's, and no checkout is named.
    """
    if peer.environment_name == "openvino":
        task = ["--task", "text-generation-with-past", "--weight-format", kind]
        return [python, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(checkpoint), *task, str(out)]
    if llama_cpp is None:
        raise SpecError(f"llama.cpp reads GGUF files: name a checkout of llama.cpp, whose {CONVERTER} writes one, with --llama-cpp DIR")
    return [python, "-I", str(HERE / "gguf.py"), str(llama_cpp), str(checkpoint), str(out), kind]
