"""A token's layers in one launch on the host: the bits of the launches of one row."""

import pytest
import torch
from same_bits import assert_same_bits

from bench.kernels.token_layers import ByLaunches, ByOneLaunch, Layer
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.persistent.check import faults_of
from coldstream.kernels.persistent.cuda import Signals, StuckError
from coldstream.kernels.persistent.program import (
    plan,
)
from coldstream.kernels.persistent.shapes import (
    DELTA_OUT,
    NO_COUNTER,
    PROJECTED,
    ROUTED,
    SHARED,
    LayerShape,
    Part,
    Ring,
    Sizes,
)

pytestmark = pytest.mark.usefixtures("host")

Q4, Q5, Q6, F32 = QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.F32
LIMIT_NS = 10**12  # each look at the host's clock takes a millisecond of it
RINGS = (Ring(2, 8192), Ring(2, 10240), Ring(2, 16384))
NAMES = (*ROUTED, *SHARED, *PROJECTED, DELTA_OUT)
TYPES = ((Q4, Q4, Q6, Q4, Q4, Q4, Q5, Q4, F32, F32, Q4), (Q4, Q5, Q4, Q6, Q6, Q5, Q6, Q5, F32, F32, Q6))
SIGNALS = (Signals(True, False, LIMIT_NS), Signals(True, True, LIMIT_NS), Signals(False, False, LIMIT_NS))


def kinds_of(sizes: Sizes) -> list[LayerShape]:
    key_heads = tuple(head % sizes.key_heads for head in range(sizes.value_heads))
    part = Part.DELTA_NET if sizes.value_heads else Part.EXPERTS
    return [LayerShape.of(sizes, dict(zip(NAMES, types, strict=True)), part, key_heads) for types in TYPES]


@pytest.mark.sharded(6)
@pytest.mark.parametrize("signals", SIGNALS)
@pytest.mark.parametrize("blocks", [3, 8])
@pytest.mark.parametrize(("heads", "warps"), [((0, 0), 8), ((2, 4), 8), ((2, 4), 12)])
def test_layers_have_the_bits_of_launches(
    heads: tuple[int, int], warps: int, blocks: int, signals: Signals
) -> None:
    """Two tokens, so that the states that the first has left are read."""
    generator = torch.Generator().manual_seed(blocks)
    kinds = kinds_of(Sizes(512, 256, 24, 3, *heads))
    layers = [Layer.random(kind, kinds[kind], generator) for kind in (0, 1, 0)]
    stream = torch.randn(1, 512, generator=generator)
    own = [layer.copied() for layer in layers]
    launches = ByLaunches(layers, stream)
    launch = ByOneLaunch(own, plan(kinds, blocks, RINGS, warps), stream)
    for _ in range(2):
        want = launches.run()
        assert want.isfinite().all()
        assert not torch.equal(want, stream)
        launch.begin()
        launch.queue(signals)
        assert_same_bits(launch.result(), want)
        for mine, its in zip(own, layers, strict=True):
            for mine_state, its_state in zip(mine.states, its.states, strict=True):
                assert_same_bits(mine_state, its_state)


def test_stamps_are_of_all_steps() -> None:
    generator = torch.Generator().manual_seed(1)
    kinds = kinds_of(Sizes(512, 256, 24, 3, 2, 4))
    layers = [Layer.random(0, kinds[0], generator) for _ in range(2)]
    stream = torch.randn(1, 512, generator=generator)
    launch = ByOneLaunch(layers, plan(kinds, 8, RINGS), stream)
    found = launch.phases(SIGNALS[0])
    names = {"in", "mix", "mix 2", "out", "route", "shared", "gate and up", "down"}
    assert names < found.keys() | {"mix 2"}
    assert all(span >= 0 for spans in found.values() for span in spans.values())


def test_numbers_that_are_none_do_not_stop_a_launch() -> None:
    """A stream of NaN becomes one of NaN, and nobody waits for a number with the bits of none."""
    generator = torch.Generator().manual_seed(2)
    kinds = kinds_of(Sizes(512, 256, 24, 3, 2, 4))
    layers = [Layer.random(0, kinds[0], generator)]
    stream = torch.full((1, 512), torch.nan)
    launch = ByOneLaunch(layers, plan(kinds, 3, RINGS), stream)
    launch.begin()
    launch.queue(SIGNALS[0])
    assert launch.result().isnan().all()


@pytest.mark.parametrize("signals", [SIGNALS[0], SIGNALS[2]])
def test_what_is_between_two_attentions_has_the_bits_of_launches(signals: Signals) -> None:
    """The end of a layer with attention, a gated DeltaNet, and the projections of the next attention."""
    generator = torch.Generator().manual_seed(3)
    sizes = Sizes(512, 256, 24, 3, 2, 4, attention=(1024, 128, 128), attention_width=768)
    types = dict(zip(NAMES, TYPES[1], strict=True)) | {
        "attn_q": Q4,
        "attn_k": Q5,
        "attn_v": Q6,
        "attn_output": Q5,
    }
    parts = (Part.BEHIND_ATTENTION, Part.DELTA_NET, Part.BEFORE_ATTENTION)
    kinds = [LayerShape.of(sizes, types, part, (0, 1, 0, 1)) for part in parts]
    layers = [Layer.random(number, kind, generator) for number, kind in enumerate(kinds)]
    stream, mixed = torch.randn(1, 512, generator=generator), torch.randn(1, 768, generator=generator)
    launches = ByLaunches([layer.copied() for layer in layers], stream)
    launches.mixed_row.copy_(mixed)
    want = launches.run()
    lists = plan(kinds, 6, RINGS)
    assert faults_of(lists, layers=3, by_words=signals.by_words) == []
    launch = ByOneLaunch(layers, lists, stream)
    launch.begin(mixed)
    launch.queue(signals)
    assert_same_bits(launch.result(), want)
    begin = lists.buffers.projected
    for want_rows in launches.attended:
        count = want_rows.numel()
        assert_same_bits(launch.words(2, begin, count), want_rows[0])
        begin += count


@pytest.mark.parametrize(
    ("signals", "missing"), [(SIGNALS[0], "bytes or numbers"), (SIGNALS[2], "counter 'route' of layer 0")]
)
def test_a_wait_without_end_is_an_error(signals: Signals, missing: str) -> None:
    """A block leaves its part of the router out, and whoever waits for it gives up."""
    generator = torch.Generator().manual_seed(4)
    kinds = kinds_of(Sizes(512, 256, 24, 3, 2, 4))
    layers = [Layer.random(0, kinds[0], generator)]
    lists = plan(kinds, 3, RINGS)
    block = lists.blocks[0][1]
    step = block.steps[block.names.index("route")]
    step.out = lists.buffers.num_words - 64  # where nobody looks
    setattr(step, "raise", NO_COUNTER)
    launch = ByOneLaunch(layers, lists, torch.randn(1, 512, generator=generator))
    launch.begin()
    launch.queue(signals)
    with pytest.raises(StuckError, match=f"threads waited without end, first for {missing}"):
        launch.result()
    launch.result()
