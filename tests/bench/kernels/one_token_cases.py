"""A small layer, and designs of `one_token_designs.py` whose rings fit it."""

from bench.kernels.one_token_designs import DESIGNS
from bench.kernels.one_token_shapes import Design, LayerShape, Ring
from bench.random_model import Shape

_SHAPE = Shape(
    hidden=256, layers=40, experts=32, experts_per_token=4, expert_ffn=256, key_heads=1, value_heads=2
)
SMALL = LayerShape.of(_SHAPE, layer=5)
FEWER_STORED = LayerShape.of(_SHAPE, layer=5, stored=8)  # two for each rank
BLOCKS, LAYERS = 3, 2
_RINGS = (Ring(2, 2048), Ring(2, 16384), Ring(2, 16384))


def small(design: Design) -> Design:
    """The same design with rings for the small layer, which stages have to be shared in."""
    return design.changed(design.name, design.why, rings=_RINGS[: len(design.rings)])


def named(name: str) -> Design:
    """One of the ladder, small."""
    return small(next(design for design in DESIGNS if design.name == name))
