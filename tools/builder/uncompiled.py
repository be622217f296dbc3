"""An artifact to use once: a built one, or a build of its model without compiling, which is gone afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...graphs.errors import ArtifactMissing
from ...lowering.artifact.artifact import Artifact
from ...models.draft_source import recorded
from ...models.family_file import FamilyFile
from ..cli import Home
from ..hub import checkpoint_of
from ..locate import artifact_path, check_family
from ..progress import Progress
from .driver import build
from .plan import Options, plan


@contextmanager
def opened(
    home: Home, name: str, dtype: str | None, draft_model: str | None = None, family: str | None = None, pictures: bool = False
) -> Iterator[Artifact]:
    """The artifact of that name, or an uncompiled build of the model of that name.

    With `dtype` or `draft_model` an artifact's model is built uncompiled too. Such builds are temporary: checking one for changes takes
    as long as building it.

    Args:
        pictures: whether such a build takes pictures, if its checkpoint has a vision tower.

    Raises:
        ArtifactStale: the artifact was built with another family than the file's.
    """
    model = name
    try:
        artifact = Artifact.open(artifact_path(home.artifacts, name))
    except ArtifactMissing:
        model = checkpoint_of(name, home.environment, Progress())
    else:
        if family is not None:
            check_family(artifact, family)
        if dtype is None and draft_model is None:
            artifact.check_runnable()
            yield artifact
            return
        model, own = artifact.manifest.build_arguments[0], FamilyFile.recorded(artifact.manifest.model)
        family = own.path if own else None
        if draft_model is None and (draft := recorded(artifact.manifest.model)):
            draft_model = str(draft.directory or draft.name)
    draft_model = draft_model and checkpoint_of(draft_model, home.environment, Progress())
    options = Options(
        model,
        buckets=(1,),
        dtype=dtype or "auto",
        backend="eager",
        draft_model=draft_model,
        family=family,
        language_model_only=not pictures or None,
    )
    planned = plan(options)
    home.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.cache, prefix="generate-") as scratch:
        out = Path(scratch) / planned.source.name
        build(planned, out, home.cache, Progress(quiet=True))
        yield Artifact.open(out)
