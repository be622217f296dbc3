"""tools/bench/serve/elsewhere.py: a refusal ends with a command line that can be run."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.bench.serve import elsewhere


def test_a_refusal_names_the_command_with_what_was_given() -> None:
    with pytest.raises(SpecError) as caught:
        elsewhere.refuse(
            "--backend sglang", elsewhere.BACKENDS["sglang"], "http://h:1", {"model": "a model", "num-prompts": None, "seed": 0}
        )
    line = "python -m sglang.bench_serving --backend sglang --dataset-name random --base-url http://h:1 --model 'a model' --seed 0"
    assert str(caught.value).endswith(f"legal is: {line}")
    assert str(caught.value).startswith("--backend sglang is gone: ")
