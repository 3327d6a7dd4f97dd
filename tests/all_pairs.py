"""Cases in which every two values of every two parameters meet, instead of all products of all values."""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[tuple[int, int], tuple[int, int]]  # two parameters and the number of a value of each


def all_pairs(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test: each argument has a parameter's values."""
    cases = [
        tuple(each[number] for each, number in zip(values.values(), row, strict=True))
        for row in rows([len(each) for each in values.values()])
    ]
    return pytest.mark.parametrize(tuple(values), cases, ids=_name)


def rows(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of values, a row for each case, always the same ones.

    Each row begins with the first pair that has not met. Every further parameter takes the value that meets
    most values of this row for the first time.
    """
    left = dict.fromkeys(
        pair
        for (i, one), (j, other) in combinations(enumerate(sizes), 2)
        for pair in product(((i, value) for value in range(one)), ((j, value) for value in range(other)))
    )
    while left:
        row = dict(next(iter(left)))
        for parameter, size in enumerate(sizes):
            if parameter not in row:
                counts = [len(_met(row, parameter, value) & left.keys()) for value in range(size)]
                row[parameter] = counts.index(max(counts))
        taken = sorted(row.items())
        for pair in combinations(taken, 2):
            left.pop(pair, None)
        yield tuple(value for _, value in taken)


def _met(row: dict[int, int], parameter: int, value: int) -> set[Pair]:
    """The pairs of a further value with those of a row."""
    one = (parameter, value)
    return {(one, other) if one < other else (other, one) for other in row.items()}


def _name(value: Any) -> str | None:
    """Of members of enumerations their name; None: pytest's own."""
    return getattr(value, "name", None)
