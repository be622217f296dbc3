"""What is known of one setting of a build: its option, its values, who decides it, how it is read back, and its names elsewhere.

Nothing here loads torch: the command line reads these records before it knows whether there is anything to build.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ....graphs.errors import SpecError

if TYPE_CHECKING:
    from .recorded import Recorded

FLAG, ROW, CHECKPOINT, PLAN, DEFAULT = "flag", "row", "checkpoint", "plan", "default"
DECIDERS = (FLAG, ROW, CHECKPOINT, PLAN, DEFAULT)
_LAST = 99

Decider = Callable[[Any, bool], str]
"""Who decided a setting that no flag decided, by the plan and by whether the checkpoint's own description quantises it."""


def by_default(plan: Any, quantised: bool) -> str:
    """Nobody decides."""
    return DEFAULT


def by_plan(plan: Any, quantised: bool) -> str:
    """The plan decides."""
    return PLAN


def by_row(plan: Any, quantised: bool) -> str:
    """A deployment decides where there is one."""
    return ROW if plan.deployment else DEFAULT


@dataclass(frozen=True)
class Setting:
    """A setting of a build. `plan` is a `tools.build.planned.Plan`, which is made from these records.

    Attributes:
        option: what the command line calls it, without dashes.
        help: of the option.
        argument: the value that makes a repeated build decide the same; "" or None leaves the option out.
        field: of `planned.Options`; by default the option's name.
        legal: names, or the smallest and the largest number, None for no bound; () for any text.
        read: turns the text of the option into the value of the field, where no numbers are legal.
        extra: further arguments of `click.option`.
        seldom: whether few need it: `--help` leaves it out, `--print-config` has it.
        by: who decides it without a flag.
        recorded: its value in an artifact as the option takes it, None where the artifact has none; None where `explain` leaves it out.
        what: the sentence about such a value.
        planned: why the plan decides as it does.
        change: what else a change changes.
        unchosen: what is said in place of why and of what changes it, by decider.
        explained: its place among the settings that `explain` begins with.
        same: options of SGLang and vLLM that mean the same.
        otherwise: their options that mean something else, each with what is legal here.
    """

    option: str
    help: str
    argument: Callable[[Any], object]
    field: str = ""
    legal: tuple[Any, ...] = ()
    read: Callable[[str], Any] = str
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seldom: bool = False
    by: Decider = by_default
    recorded: Callable[[Recorded], object] | None = None
    what: Callable[[str, Recorded], str] = lambda value, recorded: ""
    planned: str = "The plan chose it."
    change: str = ""
    unchosen: Callable[[str, Recorded], tuple[str, str] | None] = lambda by, recorded: None
    explained: int = _LAST
    same: tuple[str, ...] = ()
    otherwise: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Field of `planned.Options` that holds it."""
        return self.field or self.option.replace("-", "_")

    def check(self, value: object) -> None:
        """Refuses a value that is not legal, whoever gives it.

        Raises:
            SpecError: naming it and what is legal.
        """
        if value is None or not self.legal:
            return
        if isinstance(self.legal[0], str):
            fits, legal = value in self.legal, ", ".join(self.legal)
        else:
            least, most = self.legal
            fits = isinstance(value, int) and least <= value and (most is None or value <= most)
            legal = f"{least} to {most}" if most is not None else f"whole numbers from {least}"
        if not fits:
            raise SpecError(f"{self.name} is {value!r}; legal are {legal}")

    def value_of(self, text: str) -> Any:
        """The value of the field that the text of the option stands for."""
        return int(text) if self.legal and not isinstance(self.legal[0], str) else self.read(text)

    def as_decorator(self) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Adds the option to a command."""
        kind: click.ParamType[Any] | None = None
        if self.legal:
            kind = click.Choice(self.legal) if isinstance(self.legal[0], str) else click.IntRange(*self.legal)
        callback = None if self.legal or self.read is str else self._read_option
        said = {"type": kind, "callback": callback, "help": self.help, "hidden": self.seldom}
        return click.option(f"--{self.option}", self.name, **{**said, **self.extra})

    def _read_option(self, ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else self.read(value)
        except SpecError as error:
            raise SpecError(f"--{self.option}: {error}") from None
