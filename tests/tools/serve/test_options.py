"""tools/serve/options.py: an option of serve is a record."""

from __future__ import annotations

from npucompile.server.guard.limits import SocketLimits
from npucompile.tools.advisor.launch_lines.tables import engine
from npucompile.tools.serve.api_settings import ApiSettings
from npucompile.tools.serve.options import OPTIONS


def test_options_and_names_are_given_once():
    names = [name for option in OPTIONS for name in (f"--{option.option}", *option.same)]
    assert len(set(names)) == len(names)
    assert {name for option in OPTIONS for name in option.same} <= {*engine("sglang").flags, *engine("vllm").flags}


def test_what_they_set_are_fields():
    limits = [option.limit for option in OPTIONS if option.limit]
    assert len(set(limits)) == len(limits)
    assert set(limits) <= set(SocketLimits.__dataclass_fields__)
    assert {option.api for option in OPTIONS if option.api} == set(ApiSettings.__dataclass_fields__)
