"""The executor of rank 0 over all ranks of a mesh.

A step is one message to every other rank: the bucket, and the inputs of the rank's dp group. The ranks of a tp group compute the same
outputs, so only the first rank of each group returns them, and only those that the engine reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...graphs.types import Bucket, Limits
from ..executor import Executor, FinishedStep, Inputs, Outputs, check_step
from .control_plane import ControlPlane, RankError, error_text
from .messages import encode

OUTPUTS = ("tokens", "counts")
"""Outputs that the engine reads of every step, if its bucket has them."""

LOGPROB_OUTPUTS = ("chosen_logprobs", "top_ids", "top_logprobs")
"""Outputs that it also reads when a row asks for log probabilities."""


def select_outputs(names: Sequence[str], inputs: Inputs, outputs: Outputs) -> Outputs:
    """The outputs of one dp group that rank 0 reads: those of these names, and log probabilities if a row asks for them."""
    asks = "logprobs" in inputs and inputs["logprobs"].any()
    return {name: outputs[name] for name in (*names, *(LOGPROB_OUTPUTS if asks else ())) if name in outputs}


class ShardedExecutor:
    """All ranks of a mesh; this process is rank 0.

    Args:
        local: of rank 0.
        control_plane: of all other ranks; each of them loads an executor.
        step_timeout_s: how much longer the ranks of other dp groups may take for a step than this one.
        outputs: names of the outputs that steps return, if their bucket has them; log probabilities are returned if a row asks.

    Raises:
        RankError: another rank could not get ready.
    """

    run_ahead = 0

    def __init__(self, local: Executor, control_plane: ControlPlane, *, step_timeout_s: float, outputs: Sequence[str] = OUTPUTS) -> None:
        self.control_plane, self._local, self._step_timeout_s, self._outputs = control_plane, local, step_timeout_s, tuple(outputs)
        mesh = control_plane.mesh
        self.groups = mesh.axis("dp")
        self._group = {rank: mesh.coordinates(rank)["dp"] for rank in range(mesh.size)}
        self._first_rank = [min(rank for rank, group in self._group.items() if group == i) for i in range(self.groups)]
        self._steps = 0
        # No timeout, because loading may take long; a rank that ends or falls silent meanwhile ends the wait.
        control_plane.gather(control_plane.ranks, "ready", None)

    @property
    def limits(self) -> Limits:
        """Sizes of one dp group's pools."""
        return self._local.limits

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What `launch` takes; B is the number of rows of one dp group."""
        return self._local.buckets

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._local.vocab_size

    @property
    def max_logprobs(self) -> int:
        """Number of most likely tokens whose log probabilities steps return; 0 if they return none."""
        return self._local.max_logprobs

    @property
    def backends(self) -> Mapping[str, str]:
        """Backend by bucket name; the same on all ranks."""
        return self._local.backends

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> FinishedStep:
        """Runs one step on all ranks.

        Args:
            bucket: one of `buckets`, for all groups.
            inputs: of every dp group, as `buckets.pack` returns them.

        Returns:
            The outputs of every dp group.

        Raises:
            SpecError: for a bucket that the artifact does not have, or inputs for another number of groups.
            RankError: when a rank failed or is lost, this one included; the ranks end then.
        """
        check_step(self, bucket, inputs)
        self.control_plane.check()
        self._steps += 1
        frames = [encode("step", step=self._steps, bucket=bucket.name, inputs=dict(arrays)) for arrays in inputs]
        for rank in self.control_plane.ranks:
            self.control_plane.send(rank, frames[self._group[rank]])
        try:
            (own,) = self._local.launch(bucket, inputs[:1]).result()
        except Exception as error:
            raise self._failure(bucket, error) from error
        others = self._first_rank[1:]
        answers = self.control_plane.gather(others, "outputs", self._step_timeout_s)
        return FinishedStep([select_outputs(self._outputs, inputs[0], own), *(answers[rank].fields["outputs"] for rank in others)])

    def refresh(self) -> bool:
        """Changes nothing: all ranks keep the executables that they started with.

        Raises:
            RankError: a rank was lost since the last step.
        """
        self.control_plane.check()
        return False

    def compiles(self) -> int:
        """Of this process."""
        return self._local.compiles()

    def _failure(self, bucket: Bucket, error: Exception) -> RankError:
        """The cause of an error in a local step: usually the end of another rank, which a collective noticed first."""
        failure = self.control_plane.wait_for_failure()
        if failure is None:
            self.control_plane.fail(0, f"{bucket.name}: {error_text(error)}", lost=False)
            failure = self.control_plane.concluded_failure()
        return failure
