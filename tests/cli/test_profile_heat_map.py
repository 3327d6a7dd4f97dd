"""The picture of experts' uses: every cell once, in its shade, and a dot where an expert is resident."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.cli.profile import heat_map_svg

SVG = "{http://www.w3.org/2000/svg}"


def cells_by_colour(svg: str, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Which cells each path covers, from its bars."""
    covered = {}
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        if path.get("class") == "resident":
            continue
        mask = np.zeros(shape, int)
        for start, layer, length, back in re.findall(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z", path.attrib["d"]):
            assert length == back
            mask[int(layer), int(start) : int(start) + int(length)] += 1
        covered[path.attrib["fill"]] = mask
    return covered


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**32))
def test_every_cell_has_one_shade_and_more_uses_are_no_lighter(layers: int, experts: int, seed: int) -> None:
    uses = np.random.default_rng(seed).integers(0, 5, (layers, experts)) + 0.0
    uses[0, 0] = 5.0
    covered = cells_by_colour(heat_map_svg(uses, None, "t"), uses.shape)
    assert (sum(covered.values()) == 1).all()
    assert len(covered) == len(np.unique(uses))
    greens = np.zeros(uses.shape, int)
    for colour, mask in covered.items():
        greens += mask * int(colour[3:5], 16)
    order = np.argsort(uses, axis=None, kind="stable")
    assert (np.diff(greens.ravel()[order]) <= 0).all()


def test_residents_have_a_dot() -> None:
    svg = heat_map_svg(np.ones((3, 4)), ((0, 2), (), (3,)), "t")
    (dots,) = [path for path in ElementTree.fromstring(svg).iter(f"{SVG}path") if path.get("class")]
    assert dots.attrib["d"] == "M0.5 0.5h0M2.5 0.5h0M3.5 2.5h0"
    assert "resident" in svg
    assert "resident" not in heat_map_svg(np.ones((3, 4)), None, "t")


def test_words_of_others_cannot_change_the_picture() -> None:
    svg = heat_map_svg(np.ones((1, 1)), None, '<script>&"]]></title>')
    root = ElementTree.fromstring(svg)
    assert root.findtext(f"{SVG}title") == '<script>&"]]></title>'
    assert not list(root.iter(f"{SVG}script"))


@pytest.mark.parametrize("shape", [(40, 256), (94, 512), (1, 1)])
def test_pictures_stay_small(shape: tuple[int, int]) -> None:
    uses = np.random.default_rng(0).exponential(size=shape)
    svg = heat_map_svg(uses, [range(shape[1])] * shape[0], "t")
    assert len(svg) < 3000 + 50 * uses.size
    width = float(ElementTree.fromstring(svg).attrib["width"])
    assert width < 1700


def test_the_legend_goes_from_nothing_to_the_most_uses() -> None:
    svg = heat_map_svg(np.array([[0.25, 3.5, 1.0]]), None, "t")
    words = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "0" in words
    assert "3.5 uses a token" in words
