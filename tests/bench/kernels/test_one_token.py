"""The kernel of one launch a token computes its definition on the host, and its waits end."""

import pytest
import torch
from one_token_cases import BLOCKS, FEWER_STORED, LAYERS, SMALL, named

from bench.kernels.architectures import REGISTERS
from bench.kernels.every_kernel import DEVICES
from bench.kernels.machine_code import registers, static_shared_bytes
from bench.kernels.one_token_designs import BEST, DESIGNS, FIRST
from bench.kernels.one_token_launch import (
    ALL,
    PARTS,
    THREADS,
    Launch,
    StuckError,
    answers,
    filled_weights,
    instance,
    instances,
    phases,
    random_state,
    same,
    with_signals,
)
from bench.kernels.one_token_program import MOST_DYNAMIC_BYTES, TokenProgram, plan
from bench.kernels.one_token_reference import Reference, TokenState, words_at
from bench.kernels.one_token_shapes import NO_COUNTER, SOURCE
from coldstream.kernels.cuda.compiler import compile_uncached
from coldstream.kernels.cuda.features import HOPPER

LIMIT_NS = 10**12  # each look at the host's clock takes a millisecond of it
LIMIT_ON_A_GPU_NS = 10**9
BEGIN = random_state(SMALL, LAYERS, "cpu")
# Each has what the others lack: how blocks wait, what is joined, and where weights come from.
COMPUTED = (
    "first",
    "norm apart",
    "combine apart",
    "combine in the reader",
    "state late",
    "static near",
    "backoff",
    "joined",
    "joined, last block",
    "joined, four tokens",
)


def launched(program: TokenProgram, device: str = "cpu", limit_ns: int = LIMIT_NS) -> Launch:
    """A launch before its first token, of weights of its own."""
    weights = filled_weights(program.shape.layer_bytes, LAYERS, device)
    launch = Launch(program, weights, LAYERS, limit_ns)
    launch.begin(BEGIN)
    return launch


@pytest.mark.sharded(5)
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", COMPUTED)
def test_a_design_computes_the_definition(name: str) -> None:
    design = named(name).changed(name, "", state="ring") if name == "joined" else named(name)
    launch = launched(plan(SMALL, design, BLOCKS))
    launch.run()
    launch.check()
    want = Reference(SMALL, "cpu").run(BEGIN, design.tokens)
    assert want.stream.unique().numel() > SMALL.hidden // 2, "numbers that would show a fault"
    assert same(launch.result(), want)


@pytest.mark.usefixtures("host")
def test_fewer_experts_may_be_stored() -> None:
    assert FEWER_STORED.layer_bytes < SMALL.layer_bytes // 2
    assert FEWER_STORED.moved_bytes == SMALL.moved_bytes
    launch = launched(plan(FEWER_STORED, named("joined"), BLOCKS))
    launch.run()
    launch.check()
    assert same(launch.result(), Reference(FEWER_STORED, "cpu").run(BEGIN, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*COMPUTED, "cluster of 2", "joined, cluster"])
def test_a_design_computes_the_definition_on_a_gpu(name: str) -> None:
    if torch.cuda.get_device_capability() < HOPPER:
        pytest.skip("bulk copies and clusters came with Hopper")
    launch = launched(plan(SMALL, named(name), 2 * BLOCKS), "cuda", LIMIT_ON_A_GPU_NS)
    launch.run()
    launch.check()
    want = Reference(SMALL, "cpu").run(BEGIN, launch.planned.design.tokens)
    found = launch.result()
    assert same(TokenState(found.stream.cpu(), found.states.cpu()), want)


@pytest.mark.usefixtures("host")
def test_what_does_not_wait_computes_something_else() -> None:
    launch = launched(plan(SMALL, named("joined"), BLOCKS))
    launch.run(PARTS["memory and products"])
    assert not same(launch.result(), Reference(SMALL, "cpu").run(BEGIN, 1))


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", ["first", "joined"])
def test_a_wait_without_end_is_an_error(name: str) -> None:
    program = plan(SMALL, named(name), BLOCKS)
    lists = program.blocks[0][1]
    setattr(lists.steps[lists.names.index("out")], "raise", NO_COUNTER)
    launch = launched(program)
    launch.run()
    with pytest.raises(StuckError, match=r"waited without end, first for counter 'out' of layer 0"):
        launch.check()
    launch.check()


@pytest.mark.usefixtures("host")
def test_stamps_are_in_the_order_of_a_phase() -> None:
    launch = launched(plan(SMALL, named("first"), BLOCKS))
    launch.run(ALL, has_stamps=True)
    launch.check()
    rows = with_signals(phases(launch, skipped=0), launch.planned)
    assert [row["phase"] for row in rows] == ["in", "mix", "out", "router", "gate and up", "down"]
    for row in rows:
        assert row["begins_first"] <= row["goes_first"] <= row["raised_first"] <= row["raised_last"]
        assert all(value >= 0 for key, value in row.items() if key in ("wait", "load", "bytes", "compute"))
    assert answers(launch, skipped=0).keys() == {"known_first", "known_last", "asked_first", "asked_last"}
    layer = rows[-1]["period_ns"]
    assert abs(sum(row["phase_ns"] for row in rows) - layer) < 1e-6 * layer, "phases are all of a layer"


@pytest.mark.usefixtures("host")
def test_weights_are_filled_as_the_definition_has_them() -> None:
    weights = filled_weights(SMALL.layer_bytes, 1, "cpu").view(torch.int32)
    words = words_at(1000, 5000, "cpu")
    assert torch.equal(weights[1000:6000].long() & 0xFFFFFFFF, words)
    # Beyond 2^32 words an index has more bits than a word.
    assert not torch.equal(words_at(2**32 + 1000, 5000, "cpu"), words)


@pytest.mark.sharded(6)
@pytest.mark.parametrize("name", instances([FIRST, BEST, named("joined, cluster")])[::3])
def test_a_block_fits_on_a_multiprocessor(name: str) -> None:
    (code,) = compile_uncached(SOURCE, (name,), "sm_90a")
    assert registers(code) * THREADS <= REGISTERS
    assert static_shared_bytes(code) + MOST_DYNAMIC_BYTES <= DEVICES["sm_90a"].shared_per_block


def test_versions_have_instances_of_their_own() -> None:
    names = {instance(design, parts) for design in DESIGNS for parts in PARTS.values()}
    assert len(names) == len(PARTS) * len({(design.poll, design.fetch) for design in DESIGNS})
    assert names < set(instances(DESIGNS))
