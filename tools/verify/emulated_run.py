"""Turns a script and the graph that all ranks run into what each rank gave, and that into the largest differences from the script."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...graphs.errors import VerifyError
from ...graphs.ir.trace import signature_of
from ...graphs.types import COORDS, Leaf, Mesh, Signature
from ...models import step
from .compare import deviation, is_paged, is_seats
from .small_model import Case, Scaled, held_params
from .speculation import SEATS, alike, check_logprobs, check_seats, drafts, start
from .step_trace import Expected, Script, seat_pool

Run = Callable[[Sequence[Sequence[torch.Tensor]]], list[list[torch.Tensor]]]
"""One step of all ranks: operands of each, results of each; state operands are updated in place."""
Outputs = dict[str, torch.Tensor]
States = tuple[list[torch.Tensor], ...]
"""Pools of every rank."""
Graphs = Mapping[Case, tuple[Run, Signature]]

GARBAGE = 3.0
"""Size of the numbers in pages that nothing was written to. An NPU's attention multiplies some of them by zero, so that they must be
finite; slots hold NaN."""


SETTLED = 2e-5
"""Difference of logits up to which a sampled token must be the same: a random number is as close to a bound once in some 1e4 tokens."""


@dataclass(frozen=True)
class Allowed:
    """Largest legal differences, each over the larger of 1 and the largest value it is a difference of.

    Attributes:
        typical: of half of what a rank gives.
        worst: of all logits.
        state: of a pool's live values, root mean square over that of the values.
    """

    typical: float
    worst: float
    state: float


@dataclass(frozen=True)
class Heard:
    """What ranks gave.

    Attributes:
        turns: outputs of each rank by name, and its pool of seats after the step, by number of the turn.
        state: pools of each rank in the end.
        before, after: the same around some of the turns.
    """

    turns: Mapping[int, tuple[Outputs, ...]]
    state: States
    before: Mapping[int, States]
    after: Mapping[int, States]


@dataclass(frozen=True)
class Cast:
    """All ranks of a mesh with their parts of one small model.

    Attributes:
        leaves: state pools, global.
        params: of each rank.
    """

    small: Scaled
    script: Script
    leaves: tuple[Leaf, ...]
    params: tuple[list[torch.Tensor], ...]

    @staticmethod
    def of(small: Scaled, script: Script, checkpoint: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Cast:
        """The ranks of the small model that compute in a type."""
        model, rules = small.of(dtype), small.rules()
        signature = signature_of(step.program(model, small.cases[0].bucket, small.limits, dtype))
        held = list(zip(held_params(model, checkpoint, dtype), signature.params, strict=True))
        params = [
            [tensor[rules.local_slice(leaf.aval, small.mesh, rank)].contiguous() for tensor, leaf in held]
            for rank in range(small.mesh.size)
        ]
        return Cast(small, script, signature.state, tuple(params))

    def replay(self, graphs: Graphs, keep: Collection[int] = ()) -> Heard:
        """Plays the script: every step is fed as the script has it, seats included, whatever ranks gave before.

        Args:
            keep: turns around which the state is kept.
        """
        state: States = tuple(self._first(rank) for rank in range(self.small.mesh.size))
        turns, before, after, seats = {}, {}, {}, seat_pool(self.leaves)
        for number, turn in enumerate(self.script.turns):
            for rank, pools in enumerate(state):
                pools[seats].copy_(turn.seats[self.group(rank)])
            if number in keep:
                before[number] = self._copied(state)
            turns[number] = self._play(graphs, number, state)
            if number in keep:
                after[number] = self._copied(state)
            self._forgive(number, turns[number], state)
        return Heard(turns, state, before, after)

    def _forgive(self, number: int, said: Sequence[Outputs], state: States) -> None:
        """Rows that sampled another token, as they may, go on with the draft head's cache of the script, as with its tokens."""
        turn, prefix, page = self.script.turns[number], f"{self.small.model.family.DRAFT}.", self.small.limits.page_size
        for rank, pools in enumerate(state):
            group = self.group(rank)
            expected = turn.expected[group]
            places = [i for i in range(len(expected.rows)) if not alike(turn, group, i, said[rank])] if expected else []
            if not expected or not places or not self.small.limits.drafts:
                continue
            right = self.share(self.script.last[group], rank)
            for place in places:
                row = expected.rows[place]
                at = start(turn, group, row) + torch.arange(expected.taken[place])
                pages, offsets = turn.inputs[group]["page_table"][row, at // page], at % page
                for leaf, pool, kept in zip(self.leaves, pools, right, strict=True):
                    if leaf.path.startswith(prefix):
                        pool[pages, offsets] = kept[pages, offsets]

    def excerpt(self, graphs: Graphs, before: Mapping[int, States]) -> Heard:
        """Plays single turns, each from the state that it is given."""
        turns, after = {}, {}
        for number, state in before.items():
            after[number] = self._copied(state)
            turns[number] = self._play(graphs, number, after[number])
        return Heard(turns, (), before, after)

    def _play(self, graphs: Graphs, number: int, state: States) -> tuple[Outputs, ...]:
        turn, operands = self.script.turns[number], []
        run, signature = graphs[turn.case]
        for rank, pools in enumerate(state):
            given = {**turn.inputs[self.group(rank)], COORDS: self.small.mesh.coords(rank)}
            operands.append([*self.params[rank], *pools, *(given[leaf.path] for leaf in signature.inputs)])
        said = [dict(zip((leaf.path for leaf in signature.outputs), results, strict=True)) for results in run(operands)]
        seats = seat_pool(self.leaves)
        return tuple({**outputs, SEATS: pools[seats].clone()} for outputs, pools in zip(said, state, strict=True))

    def _copied(self, state: States) -> States:
        return tuple([pool.to(leaf.aval.dtype, copy=True) for pool, leaf in zip(pools, self.leaves, strict=True)] for pools in state)

    def share(self, pools: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """A rank's part of the reference's pools: key-value heads are copied as the model holds them, then split."""
        mesh, rules, made = self.small.mesh, self.small.rules(), []
        for leaf, pool in zip(self.leaves, pools, strict=True):
            held = pool.repeat_interleave(leaf.aval.shape[2] // pool.shape[2], 2) if is_paged(leaf) else pool
            made.append(held[rules.local_slice(leaf.aval, mesh, rank)].to(leaf.aval.dtype, copy=True))
        return made

    def _first(self, rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        pools = self.share(self.script.first[self.group(rank)], rank)
        for leaf, pool in zip(self.leaves, pools, strict=True):
            if is_paged(leaf):
                garbage = (GARBAGE * torch.randn(pool.shape, generator=generator)).to(pool.dtype)
                pool.copy_(torch.where(torch.isnan(pool), garbage, pool))
        return pools

    def group(self, rank: int) -> int:
        """Index of a rank's dp group."""
        return self.small.mesh.coordinates(rank)["dp"]

    def live(self, rank: int, pools: Sequence[torch.Tensor]) -> Iterator[tuple[Leaf, torch.Tensor]]:
        """What each of a rank's pools holds for its requests: [tokens or slots, ...]."""
        group = self.group(rank)
        for leaf, pool in zip(self.leaves, pools, strict=True):
            if is_paged(leaf):
                yield leaf, torch.cat([pool[page, :used] for page, used in self.script.pages[group]] or [pool[0, :0]])
            elif not is_seats(leaf):
                yield leaf, pool[list(self.script.slots[group])]


def against_script(cast: Cast, heard: Heard, allowed: Allowed, what: str) -> dict[str, float]:
    """Compares what ranks gave with what one device gives.

    Half of a rank's results and of each pool's live rows must be within `typical`, all logits within `worst`, and each pool within
    `state`. A greedy token, and a draft, must be the script's where its logit leads by more than the difference of the logits allows.
    Counts and seats must follow from the tokens and drafts that the rank itself said.

    Returns:
        rows, logits_error, typical_error, state_error, tokens and drafts (that had to be equal), and their mismatches (that had not).

    Raises:
        VerifyError: naming the graphs, the step, the rank, the measure, its value and the largest legal one.
    """
    typical = worst = state_error = 0.0
    rows, equals = 0, dict.fromkeys(("tokens", "token_mismatches", "drafts", "draft_mismatches"), 0)
    for rank in range(cast.small.mesh.size):
        where, errors = f"{what}, {_named(rank, cast.small.mesh)}", []
        for number, outputs in heard.turns.items():
            turn, group, said = cast.script.turns[number], cast.group(rank), outputs[rank]
            step_of = f"{where}, step {number} ({turn.case.bucket.name})"
            if (expected := turn.expected[group]) is None:
                check_seats(turn, group, said, step_of)
                continue
            error = _errors(expected, said["logits"])
            _refuse(float(error.max()), allowed.worst, f"{step_of}: logits")
            _count(equals, "token", expected, said["tokens"], _tokens(expected, said["tokens"], error, allowed.typical), step_of)
            check_seats(turn, group, said, step_of)
            if cast.small.limits.drafts:
                _count(equals, "draft", expected, said["drafts"], drafts(turn, group, said, error.amax(1), allowed.typical), step_of)
            if cast.small.max_logprobs:
                check_logprobs(expected, turn.inputs[group]["logprobs"], said, error.clamp(min=allowed.typical), step_of)
            errors.append(error[_valid(expected)])
        if errors:
            every = torch.cat(errors)
            rows += len(every)
            worst, typical = max(worst, float(every.max())), max(typical, float(every.median()))
            _refuse(float(every.median()), allowed.typical, f"{where}: half of all logits")
            state_error = max(state_error, _check_state(cast, heard, rank, allowed, where))
    told = {"rows": rows, "logits_error": worst, "typical_error": typical, "state_error": state_error, **equals}
    return {name: float(value) for name, value in told.items()}


def against_each_other(cast: Cast, one: Heard, other: Heard, what: str) -> dict[str, float]:
    """Compares two graphs that do the same arithmetic, bit for bit: tokens of live rows, and all pools but what is null.

    Seats are pools, and hold counts and drafts.

    Args:
        one: with the states after every turn that `other` has.

    Returns:
        tokens and state values compared.

    Raises:
        VerifyError: naming the step, the rank and both sides.
    """
    tokens = values = 0
    for number, outputs in other.turns.items():
        turn = cast.script.turns[number]
        for rank in range(cast.small.mesh.size):
            told = f"{what}, {_named(rank, cast.small.mesh)}, step {number} ({turn.case.bucket.name})"
            if expected := turn.expected[cast.group(rank)]:
                valid = _valid(expected)
                left, right = (each["tokens"][list(expected.rows)][valid].tolist() for each in (one.turns[number][rank], outputs[rank]))
                if left != right:
                    raise VerifyError(f"{told}: tokens of rows {expected.rows} are {left} and {right}; legal is no difference")
                tokens += len(left)
            for leaf, before, after in zip(cast.leaves, one.after[number][rank], other.after[number][rank], strict=True):
                if not torch.equal(torch.nan_to_num(before[1:]), torch.nan_to_num(after[1:])):
                    error = float((before[1:].float() - after[1:].float()).nan_to_num(float("inf")).abs().max())
                    raise VerifyError(f"{told}: {leaf.name} differs by {error:.3g} or in what is NaN; legal is no difference")
                values += after[1:].numel()
    return {"turns": float(len(other.turns)), "tokens": float(tokens), "values": float(values)}


def _valid(expected: Expected) -> torch.Tensor:
    """Which results of live rows count: [rows, W] bool."""
    return torch.arange(expected.tokens.shape[1])[None, :] < torch.tensor(expected.valid)[:, None]


def _errors(expected: Expected, logits: torch.Tensor) -> torch.Tensor:
    """Largest difference of each result's logits over the larger of 1 and its largest logit: [rows, W].

    Infinite where one is NaN, and 0 where results mean nothing.
    """
    wanted, found = expected.logits.float(), logits[list(expected.rows)].float()
    error = (wanted - found).abs().amax(-1) / wanted.abs().amax(-1).clamp(min=1.0)
    return torch.where(_valid(expected), torch.where(torch.isnan(error), float("inf"), error), 0.0)


def _tokens(expected: Expected, tokens: torch.Tensor, error: torch.Tensor, typical: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens are the script's or mean nothing, and which must be the script's: [rows, W] bool each."""
    valid, logits = _valid(expected), expected.logits.float()
    best = logits.topk(2).values
    slack = 2 * error.clamp(min=typical) * logits.abs().amax(-1).clamp(min=1.0)
    greedy = torch.tensor(expected.greedy)[:, None]
    bound = torch.where(greedy, best[:, :, 0] - best[:, :, 1] > slack, error <= SETTLED)
    return (tokens[list(expected.rows)] == expected.tokens) | ~valid, bound & valid


def _count(
    equals: dict[str, int], kind: str, expected: Expected, said: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor], what: str
) -> None:
    """Counts what is equal where it must be, and what differs where it may; refuses what differs where it must not."""
    equal, bound = found
    if bool((bound & ~equal).any()):
        right = (expected.tokens if kind == "token" else expected.drafts).tolist()
        raise VerifyError(f"{what}: {kind}s of rows {expected.rows} are {said[list(expected.rows)].tolist()}, one device's {right}")
    equals[f"{kind}s"] += int(bound.sum())
    equals[f"{kind}_mismatches"] += int((~equal & ~bound).sum())


def _check_state(cast: Cast, heard: Heard, rank: int, allowed: Allowed, where: str) -> float:
    """Largest root mean square difference of a pool's live values, over that of the values."""
    most, wanted = 0.0, cast.share(cast.script.last[cast.group(rank)], rank)
    for (leaf, left), (_, right) in zip(cast.live(rank, wanted), cast.live(rank, heard.state[rank]), strict=True):
        error = deviation(left, right)
        _refuse(error, allowed.state, f"{where}: {leaf.name}")
        rows = (left.float() - right.float()).flatten(1).abs().amax(1) / left.float().abs().max().clamp(min=1.0)
        _refuse(float(rows.median()), allowed.typical, f"{where}: half of {leaf.name}")
        most = max(most, error)
    return most


def _refuse(value: float, limit: float, what: str) -> None:
    if not value <= limit:
        raise VerifyError(f"{what} differ by {value:.3g} from one device's; legal is at most {limit:.3g}")


def _named(rank: int, mesh: Mesh) -> str:
    """`rank 3 (dp 1, tp 1)`."""
    return f"rank {rank} ({', '.join(f'{name} {at}' for name, at in mesh.coordinates(rank).items())})"
