"""Who gets the next trials: a pure function of the budget and of what was measured so far.

The same measurements always lead to the same decisions, so a run that was killed, or whose
budget was raised, is dealt again from the beginning out of the ledger, and what the ledger
lacks is exactly the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

FLOOR: Final = 3
"""Every workload gets so many trials before any gets a batch; the heaviest first where they do not suffice."""

BATCH: Final = 16
"""How many trials a workload gets at a time."""

# Ansor (Zheng et al., OSDI 2020, section 6.2) weighs what a workload gained of late against what it
# might still gain; the share of the former is its alpha.
_LATELY: Final = 0.2
# A trial without a gain makes further ones as much less likely as so many trials with some gain do.
_STALE: Final = 4.0
# What a workload is taken to reach as long as none of its trials has worked.
_PLAIN_FLOPS_PER_S: Final = 1e9


class Share(NamedTuple):
    """A workload as the budget sees it: `calls` in one inference, `flops` of each, seconds of one without tuning."""

    key: str
    calls: int
    flops: float
    untuned_s: float = math.inf


class Rules(NamedTuple):
    """The recipe's choices. `patience` trials without a gain of `min_gain` (relative) end a workload's tuning."""

    trials: int
    trials_per_task: int | None = None
    patience: int | None = None
    min_gain: float = 0.01


class _Course:
    """How the tuning of one workload went so far."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.spent = 0
        # a schedule that is slower than none is no gain
        self.best_s = share.untuned_s
        self.bests: list[float] = []
        self.last_gain = 0
        self.closed = False

    def add(self, seconds: float, min_gain: float) -> None:
        self.spent += 1
        if seconds < self.best_s * (1 - min_gain):
            self.last_gain = self.spent
        self.best_s = min(self.best_s, seconds)
        self.bests.append(self.best_s)

    @property
    def stale(self) -> int:
        """Trials since the last gain."""
        return self.spent - self.last_gain

    def promise(self) -> float:
        """Seconds of an inference that the next trial is expected to save."""
        best = self.best_s
        if math.isinf(best):
            best = max(self.share.flops, 1.0) / _PLAIN_FLOPS_PER_S
        earlier = self.bests[-min(BATCH, self.spent)]
        lately = 0.0 if math.isinf(earlier) else (earlier - self.best_s) / BATCH
        still = best / (self.spent + _STALE * self.stale)
        return self.share.calls * (_LATELY * lately + (1 - _LATELY) * still)


class Budget:
    """Deals trials in rounds. Ask `next`, tell `spend` what came of it, until `next` gives nothing."""

    def __init__(self, shares: Sequence[Share], rules: Rules) -> None:
        self._rules = rules
        ordered = sorted(shares, key=lambda share: (-share.calls * share.flops, share.key))
        self._courses = {share.key: _Course(share) for share in ordered}

    @property
    def spent(self) -> int:
        """Trials dealt and accounted for."""
        return sum(course.spent for course in self._courses.values())

    def of(self, key: str) -> int:
        """Trials that one workload has had."""
        return self._courses[key].spent

    def next(self) -> dict[str, int]:
        """Trials for the next round, by workload; empty when the budget or every workload is at its end."""
        left = self._rules.trials - self.spent
        return self._floor(left) or self._batch(left)

    def spend(self, key: str, seconds: Sequence[float], *, end: bool = False) -> None:
        """The results of a workload's trials, in the order of the ledger: infinity for those that failed.

        `end` says that there is nothing more to try.
        """
        course = self._courses[key]
        for value in seconds:
            course.add(value, self._rules.min_gain)
        course.closed = course.closed or end

    def _room(self, course: _Course) -> int:
        """How many more trials the workload may get."""
        rules = self._rules
        tired = rules.patience is not None and course.stale >= max(rules.patience, FLOOR)
        if course.closed or tired:
            return 0
        return (rules.trials_per_task or rules.trials) - course.spent

    def _floor(self, left: int) -> dict[str, int]:
        """One trial for everyone, then for everyone the rest of the floor."""
        for goal in (1, FLOOR):
            dealt: dict[str, int] = {}
            for _ in range(goal):
                for key, course in self._courses.items():
                    has = course.spent + dealt.get(key, 0)
                    if left and has < goal and self._room(course) > dealt.get(key, 0):
                        dealt[key] = dealt.get(key, 0) + 1
                        left -= 1
            if dealt:
                return dealt
        return {}

    def _batch(self, left: int) -> dict[str, int]:
        """A batch for the workload that promises most."""
        able = [course for course in self._courses.values() if left > 0 and self._room(course) > 0]
        if not able:
            return {}
        # of equals the first: they are ordered by their work
        chosen = max(able, key=_Course.promise)
        return {chosen.share.key: min(BATCH, left, self._room(chosen))}
