"""Few rows in which every two values of different factors meet: `pairwise`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

TRIES = 40

Row = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]  # factor and position of its value, twice


def pairwise(
    factors: Mapping[str, Sequence[Any]], *, allowed: Callable[[Row], bool] = lambda row: True, seed: int = 0
) -> list[Row]:
    """Rows of one value per factor; the same ones each time.

    A pair that no allowed row was found for is left out: `missing` tells which.
    """
    chooser = random.Random(seed)
    open_pairs = dict.fromkeys(all_pairs(factors))
    rows = []
    while open_pairs:
        wanted = next(iter(open_pairs))
        best: tuple[int, dict[str, int]] | None = None
        for _ in range(TRIES):
            places = {name: chooser.randrange(len(values)) for name, values in factors.items()}
            places.update(wanted)
            if allowed(_row(factors, places)):
                gain = sum(pair in open_pairs for pair in _pairs(places))
                best = max(best or (0, places), (gain, places), key=lambda found: found[0])
        if best is None:
            del open_pairs[wanted]
            continue
        for pair in _pairs(best[1]):
            open_pairs.pop(pair, None)
        rows.append(_row(factors, best[1]))
    return rows


def missing(factors: Mapping[str, Sequence[Any]], rows: Sequence[Row]) -> list[Row]:
    """The pairs, as rows of two factors, that meet in none of the rows."""
    met = {
        pair
        for row in rows
        for pair in _pairs({name: list(values).index(row[name]) for name, values in factors.items()})
    }
    return [_row(factors, dict(pair)) for pair in all_pairs(factors) if pair not in met]


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    """Every two values of different factors."""
    for one, other in itertools.combinations(factors, 2):
        for i, j in itertools.product(range(len(factors[one])), range(len(factors[other]))):
            yield (one, i), (other, j)


def _pairs(places: Mapping[str, int]) -> Iterator[Pair]:
    return itertools.combinations(places.items(), 2)


def _row(factors: Mapping[str, Sequence[Any]], places: Mapping[str, int]) -> Row:
    return {name: factors[name][place] for name, place in places.items()}
