"""npucompile: pure-function LLM programs, compiled per batch bucket ahead of time and served from a verified artifact.

`import npucompile as npc`; `dir(npc)` is what it offers, and docs/python.md shows it. Versions promise these names, what they take and
what they return, by the rules of semantic versioning; every other module may change with any release.
"""

import os

# torch_npu registers itself as an autoloaded torch backend; without CANN that makes a bare `import torch` fail.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# The C library gives buffers as large as logits back after every step: in small pages, making them anew takes 4 to 11 % of one of 64 rows.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Mooncake reads them when it is imported. With its own bounds a peer that was sent many segments at a time is never reached again.
os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")
os.environ.setdefault("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535")
# It says on standard error what it opens and closes.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

ISA = os.environ.get("NPUCOMPILE_ISA", "")
"""The most of the instruction sets of lowering/isa.py that this process and those that it starts may use; "" for what there is."""

__version__ = "0.1.0"

_FACE = {
    "Aval": "graphs.types",
    "Client": "server.client",
    "Compiled": "tools.face.stages",
    "Completion": "tools.face.llm",
    "Delta": "tools.face.llm",
    "LLM": "tools.face.llm",
    "Lowered": "tools.face.stages",
    "Mesh": "graphs.types",
    "Partitioned": "tools.face.stages",
    "Rules": "graphs.types",
    "Sampling": "runtime.request",
    "Traced": "tools.face.stages",
    "constrain": "graphs.spmd.layout",
    "errors": "graphs",
    "trace": "tools.face.stages",
}
"""What is offered, by the module that has it. It is imported when it is asked for: half of it needs torch, which takes a second."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .graphs import errors as errors
    from .graphs.spmd.layout import constrain as constrain
    from .graphs.types import Aval as Aval
    from .graphs.types import Mesh as Mesh
    from .graphs.types import Rules as Rules
    from .runtime.request import Sampling as Sampling
    from .server.client import Client as Client
    from .tools.face.llm import LLM as LLM
    from .tools.face.llm import Completion as Completion
    from .tools.face.llm import Delta as Delta
    from .tools.face.stages import Compiled as Compiled
    from .tools.face.stages import Lowered as Lowered
    from .tools.face.stages import Partitioned as Partitioned
    from .tools.face.stages import Traced as Traced
    from .tools.face.stages import trace as trace
else:

    def __getattr__(name):
        """Imports a name of the face."""
        if name not in _FACE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(_FACE)}")
        import importlib

        module = importlib.import_module(f".{_FACE[name]}", __name__)
        # errors is a module of its own.
        value = globals()[name] = getattr(module, name, None) or importlib.import_module(f".{name}", module.__name__)
        return value

    def __dir__():
        """The face."""
        return [*_FACE, "__version__"]
