"""Who gets how many trials: a pure function of the workloads and the budget."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Final

FLOOR: Final = 3
"""Every workload gets so many before shares count; the heaviest first where they do not suffice."""


def allocate(
    shares: Sequence[tuple[str, float]], trials: int, caps: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Trials per workload; `shares` are keys with the work of each, `caps` the most that a key takes.

    A larger budget takes nothing away from anyone: trials are dealt one by one, first to the
    floor, then by Sainte-Laguë's method, whose seats only grow. So raising the budget asks for
    exactly the difference. What a capped workload cannot use goes to the others.
    """
    caps = caps or {}
    order = sorted(shares, key=lambda share: (-share[1], share[0]))
    # what has no arithmetic at all still gets a trial now and then, behind everything else
    work = {key: share or 1e-9 for key, share in order}
    given = dict.fromkeys(work, 0)

    def has_room(key: str) -> bool:
        return given[key] < caps.get(key, trials)

    left = trials
    for level in range(1, FLOOR + 1):
        for key in given:
            if left and given[key] < level and has_room(key):
                given[key] += 1
                left -= 1
    queue = [
        (-work[key] / (2 * given[key] + 1), place, key)
        for place, key in enumerate(given)
        if has_room(key)
    ]
    heapq.heapify(queue)
    while left and queue:
        _, place, key = heapq.heappop(queue)
        given[key] += 1
        left -= 1
        if has_room(key):
            heapq.heappush(queue, (-work[key] / (2 * given[key] + 1), place, key))
    return given
