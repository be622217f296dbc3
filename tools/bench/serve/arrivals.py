"""When the requests of a load arrive."""

from __future__ import annotations

import itertools
import math
import random

from ....graphs.errors import SpecError


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> tuple[float, ...]:
    """Seconds since the start at which each request arrives; the first at 0, the same for the same arguments.

    Args:
        rate: mean requests per second; infinity sends all at once.
        burstiness: shape of the gamma distribution of the gaps. 1 is a Poisson process, below it requests come in bursts, above it they
            are spread evenly.

    Raises:
        SpecError: a rate or burstiness that is not above 0.
    """
    if not rate > 0 or not 0 < burstiness < math.inf:
        raise SpecError(f"a request rate of {rate} with burstiness {burstiness}; legal are numbers above 0, and inf as a rate")
    if math.isinf(rate):
        return (0.0,) * count
    draw = random.Random(seed)
    gaps = (draw.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count - 1))
    return tuple(itertools.accumulate(gaps, initial=0.0))[:count]
