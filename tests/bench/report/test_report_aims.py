"""The page of aims says what is reached by the figures that it prints, and where a miss is explained."""

import re

import pytest

from bench.report import aims as report_aims
from bench.report.aims import Aim


@pytest.mark.parametrize(
    ("wanted", "found", "is_most", "is_met"),
    [
        (3.0, 3.04, True, True),  # printed as 3.0
        (3.0, 3.06, True, False),
        (3.0, 2.0, True, True),
        (3.0, 2.96, False, True),
        (3.0, 2.94, False, False),
        (3.0, 4.0, False, True),
    ],
)
def test_an_aim_is_reached_by_what_is_printed(
    wanted: float, found: float, is_most: bool, is_met: bool
) -> None:
    assert Aim("rows", wanted, found, "a.json", 1, is_most=is_most).is_met == is_met


def test_a_figure_between_two_measured_ones_is_on_a_line() -> None:
    steps = {"1": 1.0, "8": 4.0, "9": 6.0, "16": 13.0}
    assert [report_aims.between(steps, rows) for rows in (1, 8, 9, 16)] == [1.0, 4.0, 6.0, 13.0]
    assert report_aims.between(steps, 12) == 9.0


def test_reasons_are_sections_of_pages() -> None:
    pages = "".join(block() for block in report_aims.BLOCKS.values())
    reasons = re.findall(r"\[why\]\(([^)]*)\)", pages)
    assert reasons
    assert all(re.fullmatch(r"[\w-]+\.md#[\w-]+", reason) for reason in reasons)


def test_every_line_that_is_not_reached_says_why() -> None:
    lines = "".join(block() for block in report_aims.BLOCKS.values()).splitlines()
    assert not [line for line in lines if "| no |" in line]
