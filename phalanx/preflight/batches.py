"""The largest batch that fits, by trying."""

from __future__ import annotations

from collections.abc import Callable

LIMIT = 2**20
"""Rows for each replica at which the search ends."""

_FINENESS = 64
"""The search ends when it knows the largest batch but for this part of it: each trial compiles the step."""


def largest(needed: Callable[[int], tuple[bool, int]], start: int, available: int | None) -> int:
    """About the largest number of rows r with ``needed(r)[0]``, of which more need more memory; 0 when 1 does not fit.

    Memory grows about linearly with the rows, so that a straight line through two trials often hits the spot; it
    is bisection all the same. r fits, and what is larger by a 64th (of few rows: by one) does not.

    Args:
        needed: tries a number of rows; whether it fits, and the bytes it needs.
        start: where to begin.
        available: bytes there are; None: no limit.
    """
    tried: dict[int, tuple[bool, int]] = {}

    def fits(rows: int) -> bool:
        if rows not in tried:
            tried[rows] = needed(rows)
        return tried[rows][0]

    low, high = 0, LIMIT + 1

    def step() -> int:
        return max(1, low // _FINENESS) if high <= LIMIT else 1

    rows = min(max(1, start), LIMIT)
    while high - low > step():
        if fits(rows):
            low = rows
        else:
            high = rows
        guess = _on_a_line(tried, low, high, available)
        # Close to the line both sides are tried; far from it halving is what is left.
        rows = min(max(guess, low + step()), high - step())
        if len(tried) > 4 and high - low > 2:
            rows = (low + high) // 2 if high <= LIMIT else min(2 * low, LIMIT)
    return low


def _on_a_line(tried: dict[int, tuple[bool, int]], low: int, high: int, available: int | None) -> int:
    """Where a line through the two trials that are nearest to the limit meets it."""
    if high > LIMIT and low:
        ahead = 2 * low
    elif low == 0:
        ahead = max(1, high // 2)
    else:
        ahead = (low + high) // 2
    points = sorted(tried, key=lambda r: abs(tried[r][1] - (available or 0)))[:2]
    if available is None or len(points) < 2:
        return ahead
    (a, b) = sorted(points)
    slope = (tried[b][1] - tried[a][1]) / (b - a)
    return ahead if slope <= 0 else int(a + (available - tried[a][1]) / slope)
