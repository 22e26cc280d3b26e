"""How transfers share the bandwidth at their two ends.

Rates are raised from zero in rounds: in each, every end divides what it has left evenly among its
transfers, and a transfer takes the smaller of its two parts, until one end, or its own limit, is
exhausted. Nothing is handed out twice, and after enough rounds nothing is left that a transfer
could use. Where a single end is short this is max-min fairness; where several are, it is close.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.intp]

_TINY = 1e-9


def share(
    weight: Floats,
    source: Indexes,
    target: Indexes,
    source_room: Floats,
    target_room: Floats,
    limit: Floats,
    rounds: int,
) -> Floats:
    """The rates of some transfers, [transfers].

    A transfer of rate x takes ``weight * x`` of its source's room and x of its target's, and stays
    within its limit. ``source_room`` and ``target_room`` (not negative) are changed to what is
    left of them.
    """
    rates = np.zeros(len(weight))
    going = np.flatnonzero(limit > 0)
    left = limit[going]
    source_least, target_least = _TINY * source_room, _TINY * target_room
    for _ in range(rounds):
        if not len(going):
            break
        heavy, here, there = weight[going], source[going], target[going]
        wanted = np.bincount(here, heavy, minlength=len(source_room))
        takers = np.bincount(there, minlength=len(target_room))
        parts = np.minimum(
            (source_room / np.maximum(wanted, _TINY))[here],
            (target_room / np.maximum(takers, 1))[there],
        )
        taken = np.minimum(parts, left)
        rates[going] += taken
        source_room -= np.bincount(here, heavy * taken, minlength=len(source_room))
        target_room -= np.bincount(there, taken, minlength=len(target_room))
        np.maximum(source_room, 0, out=source_room)
        np.maximum(target_room, 0, out=target_room)
        left = left - taken
        more = (
            (left > _TINY * limit[going])
            & (source_room > source_least)[here]
            & (target_room > target_least)[there]
        )
        going, left = going[more], left[more]
    return rates
