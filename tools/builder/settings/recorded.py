"""What an artifact records of its settings, read from its manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ....graphs.steps.kind import StepKind
from ....graphs.steps.prefill import PREFILL
from ....graphs.steps.score import SCORE
from ....graphs.steps.table import kind_of
from ....graphs.types import DTYPES, Mesh
from ....lowering.artifact.manifest import Manifest
from ....models import draft_vocabulary, registry
from ....models.family_file import FamilyFile
from ...notation import EncodeSize, PrefillSize, format_buckets, format_encode, format_prefill


@dataclass(frozen=True)
class Recorded:
    """The settings of a manifest that are not fields of it."""

    manifest: Manifest

    @property
    def ranks(self) -> int:
        return Mesh.parse(self.manifest.mesh).size

    @property
    def group(self) -> str:
        """Words for what is counted in each dp group; "" where there is one group."""
        return " of each dp group" if Mesh.parse(self.manifest.mesh).axis("dp") > 1 else ""

    @property
    def decode(self) -> str | None:
        """Decode batch sizes, in the notation of the option; None where there are none."""
        sizes = sorted({entry.bucket.batch for entry in self.manifest.graphs if kind_of(entry.bucket).decodes})
        return format_buckets(sizes) if sizes else None

    @property
    def widths(self) -> str | None:
        """Tokens of a request that decode steps have, in the notation of the option; None where nothing is drafted."""
        widths = sorted({entry.bucket.q_len for entry in self.manifest.graphs if kind_of(entry.bucket).decodes})
        return format_buckets(widths) if widths and self.manifest.limits.drafts else None

    @property
    def prefill(self) -> str | None:
        """Prefill sizes, in the notation of the option; None where there are none."""
        return self._chunks(PREFILL)

    @property
    def score(self) -> str | None:
        """Sizes of score steps, in the same notation."""
        return self._chunks(SCORE)

    def _chunks(self, kind: StepKind) -> str | None:
        buckets = kind.among(entry.bucket for entry in self.manifest.graphs)
        return format_prefill([PrefillSize(bucket.q_len, bucket.batch) for bucket in buckets]) if buckets else None

    @property
    def encode(self) -> str | None:
        """Encode sizes, in the notation of the option; None where there are none."""
        buckets = [entry.bucket for entry in self.manifest.graphs if kind_of(entry.bucket).tower]
        sizes = [EncodeSize(bucket.q_len, bucket.batch) for bucket in buckets]
        return format_encode(sizes) if sizes else None

    @property
    def dtype(self) -> str:
        """The name of the computing type on the command line."""
        return str(DTYPES[self.manifest.dtype]).removeprefix("torch.")

    @property
    def draft_vocab(self) -> int:
        """Tokens that may be drafted, the first ones; 0 for all."""
        return draft_vocabulary.recorded(self.manifest.params)

    @property
    def declares_draft_head(self) -> bool:
        """Whether the configuration of the model has a draft head."""
        model, family = self.manifest.model, FamilyFile.recorded(self.manifest.model)
        return registry.from_config(str(model["name"]), json.loads(model["config"]), family=family).has_draft_head

    def argument(self, option: str) -> str | None:
        """The value that the build was given for an option, or None."""
        words = self.manifest.build_arguments
        return words[words.index(f"--{option}") + 1] if f"--{option}" in words else None
