"""A token's layers in one launch on the host: the bits of the launches of one row."""

import pytest
import torch
from same_bits import assert_same_bits

from bench.kernels.token_layers import ByLaunches, ByOneLaunch, MoeLayer
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.persistent.cuda import Signals
from coldstream.kernels.persistent.program import MoeShape, Ring, plan

pytestmark = pytest.mark.usefixtures("host")

Q4, Q5, Q6 = QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K
RINGS = (Ring(2, 2048), Ring(2, 8192), Ring(2, 16384))
LIMIT_NS = 10**12  # each look at the host's clock takes a millisecond of it
KINDS = (
    MoeShape.of((512, 256, 24, 3), (Q4, Q4, Q6), (Q4, Q4, Q4)),
    MoeShape.of((512, 256, 24, 3), (Q4, Q5, Q4), (Q6, Q6, Q5)),
)


SIGNALS = (Signals(True, False, LIMIT_NS), Signals(True, True, LIMIT_NS), Signals(False, False, LIMIT_NS))


@pytest.mark.parametrize("signals", SIGNALS)
@pytest.mark.parametrize("blocks", [3, 8])
def test_layers_of_experts_have_the_bits_of_launches(blocks: int, signals: Signals) -> None:
    generator = torch.Generator().manual_seed(blocks)
    layers = [MoeLayer.random(kind, KINDS[kind], generator) for kind in (0, 1, 0)]
    stream = torch.randn(1, 512, generator=generator)
    want = ByLaunches(layers, stream).run()
    launch = ByOneLaunch(layers, plan(KINDS, blocks, RINGS), stream)
    launch.begin()
    launch.queue(signals)
    assert_same_bits(launch.result(), want)
