"""Turns the ranks of a job into one executor for the engine of rank 0.

A step is one message to every other rank: the bucket, and the inputs of the rank's dp group. The ranks of a tp group hold the same
outputs, so only the first of each group answers, and only with what the engine reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...graphs.types import Bucket, Limits
from ..executor import Executor, FinishedStep, Inputs, Outputs, check_step
from .control_plane import Job, RankError, plain
from .messages import encode

OUTPUTS = ("tokens", "counts")
"""What the engine reads of a step, where its bucket has it."""

LOGPROBS = ("chosen_logprobs", "top_ids", "top_logprobs")
"""What it reads besides when a row asked for log probabilities."""


def told(names: Sequence[str], inputs: Inputs, outputs: Outputs) -> Outputs:
    """Of the outputs of one dp group those that rank 0 wants to know: what has one of these names, and log probabilities where asked."""
    asked = "logprobs" in inputs and inputs["logprobs"].any()
    return {name: outputs[name] for name in (*names, *(LOGPROBS if asked else ())) if name in outputs}


class ShardedExecutor:
    """All ranks of a job, rank 0 being this process.

    Args:
        local: of rank 0.
        job: whose other ranks have, or are about to have, an executor each.
        step_timeout_s: how long the ranks of other dp groups may take longer for a step than this one.
        outputs: names of what steps return, where their bucket has it; log probabilities are returned wherever a row asks.

    Raises:
        RankError: another rank could not get ready.
    """

    run_ahead = 0

    def __init__(self, local: Executor, job: Job, *, step_timeout_s: float, outputs: Sequence[str] = OUTPUTS) -> None:
        self.job, self._local, self._step_timeout_s, self._outputs = job, local, step_timeout_s, tuple(outputs)
        mesh = job.mesh
        self.groups = mesh.axis("dp")
        self._group = {rank: mesh.coordinates(rank)["dp"] for rank in range(mesh.size)}
        self._first = {group: min(rank for rank, own in self._group.items() if own == group) for group in range(self.groups)}
        self._steps = 0
        # Loading may take long; a rank that ends meanwhile, or falls silent, ends the wait.
        job.gather(job.ranks, "ready", None)

    @property
    def limits(self) -> Limits:
        """Sizes of one dp group's pools."""
        return self._local.limits

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What steps run; B is the number of rows of one dp group."""
        return self._local.buckets

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._local.vocab_size

    @property
    def max_logprobs(self) -> int:
        """Of how many of the most likely tokens log probabilities are told; 0: none are."""
        return self._local.max_logprobs

    @property
    def backends(self) -> Mapping[str, str]:
        """Backend by bucket name; the same on all ranks."""
        return self._local.backends

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> FinishedStep:
        """Runs one step on all ranks.

        Args:
            bucket: one of `buckets`, for all groups.
            inputs: of every dp group, as `buckets.pack` makes them.

        Returns:
            The outputs of every dp group.

        Raises:
            SpecError: for a bucket the artifact does not have, or inputs for another number of groups.
            RankError: when a rank failed or is lost, this one included; the ranks end then.
        """
        check_step(self, bucket, inputs)
        self.job.check()
        self._steps += 1
        frames = [encode("step", step=self._steps, bucket=bucket.name, inputs=dict(arrays)) for arrays in inputs]
        for rank in self.job.ranks:
            self.job.send(rank, frames[self._group[rank]])
        try:
            (own,) = self._local.launch(bucket, inputs[:1]).result()
        except Exception as error:
            raise self._failed(bucket, error) from error
        outputs: list[Outputs] = [told(self._outputs, inputs[0], own)]
        answers = self.job.gather([self._first[group] for group in range(1, self.groups)], "outputs", self._step_timeout_s)
        return FinishedStep([*outputs, *(answers[self._first[group]].fields["outputs"] for group in range(1, self.groups))])

    def refresh(self) -> bool:
        """Changes nothing: all ranks keep the executables they started with.

        Raises:
            RankError: a rank was lost while there was nothing to do.
        """
        self.job.check()
        return False

    def compiles(self) -> int:
        """Of this process."""
        return self._local.compiles()

    def _failed(self, bucket: Bucket, error: Exception) -> RankError:
        """What made a step fail here: mostly the end of another rank, which a collective noticed first."""
        found = self.job.failing()
        if found is None:
            self.job.fail(0, f"{bucket.name}: {plain(error)}", gone=False)
            found = self.job.wait_failure()
        return found
