"""The commands that build and serve what lines of a script come to: where artifacts go, which builds are one, which servers may be many."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ...serve.lines import Server, replicas
from ...serve.options import DECODE, HOST, PORT, PREFILL
from .facts import LaunchFacts
from .proposal import Proposal


def place_of(proposal: Proposal) -> str:
    """What `serve` calls the artifact."""
    out = proposal.arguments.get("out")
    name = proposal.model.rstrip("/").rpartition("/")[2] if "/" in proposal.model else proposal.model
    phase = proposal.arguments.get("phase")
    return out or (f"{name}-{phase}" if phase else name)


def build_command(proposal: Proposal) -> str:
    """The command that builds one artifact."""
    return " ".join(shlex.quote(word) for word in ("npucompile", "build", *proposal.words))


def build_commands(proposals: Sequence[Proposal]) -> list[str]:
    """Build commands; one for both phases of a deployment where nothing else differs."""
    found = []
    for proposal in proposals:
        phase = proposal.arguments.get("phase")
        same = [other for other in proposals if phase and _without_phase(other) == _without_phase(proposal)]
        if {other.arguments.get("phase") for other in same} == {PREFILL, DECODE}:
            proposal = replace(proposal, arguments=_without_phase(proposal)[1])
        found.append(build_command(proposal))
    return found


def _without_phase(proposal: Proposal) -> tuple[str, dict[str, str]]:
    """The model and the arguments of a build, as they would be for all phases."""
    phase = proposal.arguments.get("phase")
    own = {name: value for name, value in proposal.arguments.items() if name != "phase"}
    return proposal.model, own | {name: own[name].removesuffix(f"-{phase}") for name in ("out",) if name in own and phase}


def replicated(facts: LaunchFacts, proposal: Proposal, server: Server) -> tuple[str, ...]:
    """The build of one dp group, a server for each, and a router; nothing where groups share experts, or are on several machines.

    Args:
        server: the one of all groups, in whose place the router listens.
    """
    plan, groups = proposal.plan, facts.mesh.axis("dp")
    if plan is None or facts.role != "mixed" or facts.nodes > 1 or groups == 1:
        return ()
    if getattr(plan.model.config, "num_experts", 0):
        return ()
    tp, words = facts.mesh.axis("tp"), server.options[0]
    place = {name: value for name, value in pairwise(words) if name in ("--host", "--port")}
    others = [word for at, word in enumerate(words) if word not in place and words[max(at - 1, 0)] not in place]
    one = replace(proposal, arguments={**proposal.arguments, "mesh": f"dp=1,tp={tp}", "out": f"{place_of(proposal)}-tp{tp}"})
    where = place.get("--host", HOST), int(place.get("--port", PORT))
    servers, router = replicas(place_of(one), groups, tp, *where, others, server.variables)
    return (build_command(one), *(line for each in servers for line in each.lines()), router)
