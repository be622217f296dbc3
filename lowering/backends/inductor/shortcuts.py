"""Work of torch's compiler that takes two fifths of a body's seconds, left out.

The code that comes of it has the same calls in the same order and as many loops; small integer computations may stand in another of these.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule

DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
"""Digest of this file; part of an executable's key, because the text of a lowered graph says nothing of it."""


@contextmanager
def taken() -> Iterator[None]:
    """Sets what compiles of flat graphs do with less."""
    from torch._inductor import compile_fx, sizevars
    from torch._inductor.codegen import common

    own: Any = common
    algebra: Any = sizevars
    with ExitStack() as stack:
        stack.enter_context(patch.object(compile_fx, "aot_export_module", _traced))
        stack.enter_context(patch.object(compile_fx, "_unlift_graph", lambda model, graph, signature: graph))
        # Vectors are chosen by strides, differences of polynomials, for which torch asks sympy for the simplest of all forms.
        expanding = SimpleNamespace(**vars(algebra.sympy) | {"simplify": algebra.sympy.expand})
        stack.enter_context(patch.object(algebra, "sympy", expanding))
        # Torch makes the rules of all operators again for each operation, of one object.
        stack.enter_context(patch.object(own, "DtypePropagationOpsHandler", functools.cache(own.DtypePropagationOpsHandler)))
        yield


def _traced(model: GraphModule, operands: Sequence[torch.Tensor], *, decompositions: Any, **_: object) -> tuple[GraphModule, None]:
    """The graph in the operators that inductor knows, for fake operands: what torch finds in two passes, of which one makes it functional.

    Lowered graphs are: they write their operands by native operators, and by copies at the end (lowering/lower.py).
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = detect_fake_mode(operands)
    assert mode is not None
    # The names of operators before they are decomposed become those of functions in the code.
    with torch.no_grad(), mode, torch.fx.traceback.preserve_node_meta():
        return make_fx(model, decomposition_table=decompositions, _error_on_data_dependent_ops=True)(*operands), None
