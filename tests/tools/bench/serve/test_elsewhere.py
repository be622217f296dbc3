"""tools/bench/serve/elsewhere.py: a refusal ends with a command line that can be run."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.bench.serve.elsewhere import BACKENDS, DATASETS, OPTIONS, OURS, refuse_what_others_do

GONE = [
    *((f"--backend {name}", (name, "random", ()), command) for name, command in BACKENDS.items()),
    *((f"--dataset {name}", (OURS, name, ()), command) for name, command in DATASETS.items()),
    *((f"--{name}", (OURS, "random", (name,)), command) for name, command in OPTIONS.items()),
]


@pytest.mark.parametrize(("option", "given", "command"), GONE, ids=[option for option, *_ in GONE])
def test_a_refusal_names_the_command_that_does_it(option, given, command) -> None:
    with pytest.raises(SpecError) as caught:
        refuse_what_others_do(*given, "http://h:1")
    assert str(caught.value).startswith(f"{option} is gone: ")
    assert str(caught.value).endswith(f"legal is: {command} --base-url http://h:1")


def test_what_this_command_does_is_not_refused() -> None:
    refuse_what_others_do(OURS, "random", (), "http://h:1")
    with pytest.raises(SpecError, match="--backend is 'tgi'; legal is npucompile-ws"):
        refuse_what_others_do("tgi", "random", (), "http://h:1")
