"""How a served model presents itself: its names, how it converses, and the sampling that requests start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...graphs.errors import ModelError, SpecError
from ...lowering.artifact.artifact import Artifact
from ...server.chat.format import AUTO, ChatFormat
from ...server.chat.template import ChatTemplate

CHECKPOINT, OPENAI = "checkpoint", "openai"
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sampling parameters that adjust logits, and their values that do not."""


@dataclass(frozen=True)
class ApiSettings:
    """What a user says of it.

    Attributes:
        names: of the model in requests, the first in answers; with none, the artifact's.
        chat_template: a file that takes the place of the artifact's template.
        reasoning_parser, tool_call_parser: see `ChatFormat.of`.
        sampling: CHECKPOINT takes defaults from the checkpoint's generation_config.json where it has some, OPENAI never.
    """

    names: tuple[str, ...] = ()
    chat_template: Path | None = None
    reasoning_parser: str = AUTO
    tool_call_parser: str = AUTO
    sampling: str = CHECKPOINT

    def __post_init__(self) -> None:
        if "" in self.names or len(set(self.names)) < len(self.names):
            raise SpecError(f"served model names are {', '.join(map(repr, self.names))}; legal are names that differ and are not empty")

    def names_of(self, artifact: Artifact) -> tuple[str, ...]:
        """Names of the model in requests."""
        return self.names or (str(artifact.manifest.model["name"]),)

    def defaults_of(self, artifact: Artifact) -> Mapping[str, float]:
        """Sampling parameters of HTTP requests that do not set them, where they are not OpenAI's."""
        recommended: Mapping[str, float] = artifact.manifest.model.get("sampling", {}) if self.sampling == CHECKPOINT else {}
        return {name: value for name, value in recommended.items() if name not in self.left_out_of(artifact)}

    def left_out_of(self, artifact: Artifact) -> Mapping[str, float]:
        """What the checkpoint recommends, and the artifact's graphs cannot do, as they take no adjustments of logits."""
        if self.sampling != CHECKPOINT or artifact.manifest.limits.logit_adjustments:
            return {}
        recommended = artifact.manifest.model.get("sampling", {})
        return {name: recommended[name] for name, neutral in PENALTIES.items() if recommended.get(name, neutral) != neutral}

    def said_of_sampling(self, artifact: Artifact) -> Sequence[str]:
        """Lines that say what a server takes from the checkpoint, and what it leaves."""
        taken, left = self.defaults_of(artifact), self.left_out_of(artifact)
        file = "the checkpoint's generation_config.json"
        lines = [f"HTTP requests that set no sampling have {_shown(taken)} of {file} (--default-sampling)"] if taken else []
        why = "this artifact was built without --logit-adjustments"
        return [*lines, *([f"{_shown(left)} of {file} is left out: {why}"] if left else [])]

    def chat_of(self, artifact: Artifact) -> ChatFormat:
        """How the model converses.

        Raises:
            ModelError: the template is none, or its file cannot be read.
            SpecError: there is no parser of that name.
        """
        file = self.chat_template
        # Of sizes alone, that of the checkpoint that is served (checkpoint_texts.py).
        text = artifact.manifest.model.get("template")
        if file is None and text is None and artifact.manifest.chat_template:
            file = artifact.path / artifact.manifest.chat_template
        if file is not None:
            text = _text(file)
        template = None if text is None else ChatTemplate(text, artifact.manifest.model.get("special_tokens", {}))
        return ChatFormat.of(template, self.reasoning_parser, self.tool_call_parser)


def _shown(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read as UTF-8 text: {error}") from None
