"""First steps of prompts on simulated machines cost hardly more than the best fixed way of dividing them."""

from dataclasses import replace

import pytest

from bench.engine.first_prompts import Machine, Steps, costs, grid

SLOW = Machine(bus=6.6e9, cores=6)
MACHINES = {
    "PCIe 4 x4": SLOW,
    "programs have the bus in turn": replace(SLOW, programs=3),
    "a quarter of PCIe 4 x4 in turn": replace(SLOW, bus=3e9, cores=16, programs=3),
    "13 GB/s in turn": replace(SLOW, bus=13e9, programs=3, resident=0.36),
    "PCIe 5 x16, 16 cores": Machine(bus=50e9, cores=16),
    "two cores": Machine(bus=26e9, cores=2),
    "the bus has half beside the CPU": Machine(bus=26e9, cores=6, beside=0.5),
}


@pytest.mark.sharded(of="measurements")
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("forecast", [1.0, 4.0])
def test_no_way_is_tried_whose_first_layers_show_that_it_takes_several_times_as_long(
    machine: Machine, forecast: float
) -> None:
    """Whatever a plan says of the CPU. A whole step without it was 1.2 to 1.9 of the first four or eight."""
    found = costs(replace(machine, forecast=forecast, layers=24), 512, [4, 8])
    assert max(found.values()) <= 1.1


@pytest.mark.sharded(of="measurements")
@pytest.mark.parametrize("seed", range(4))
def test_where_the_bus_alone_is_faster_it_is_found_in_each_process(seed: int) -> None:
    """Q2_0 with a third of its experts on a GPU with the whole bus, with noise."""
    machine = Machine(bus=50e9, cores=16, resident=0.36, expert_bytes=860_000, noise=0.05, layers=16)
    steps = Steps(machine, seed)
    seconds = steps.run(2048, 12)
    assert not any(steps.ways[6:])
    assert sum(seconds[6:]) <= 1.05 * sum(Steps(machine, seed, way=False).run(2048, 12)[6:])


@pytest.mark.sharded(of="measurements")
def test_another_program_that_takes_the_cores_for_some_steps_changes_it_for_no_longer() -> None:
    machine = replace(SLOW, layers=16, load=lambda number: 4.0 if 4 <= number < 10 else 1.0)
    assert all(Steps(machine).run(512, 1))
    steps = Steps(machine)
    steps.run(512, 20)
    assert all(steps.ways[12:])


def test_the_grid_has_slow_and_fast_buses_few_and_many_cores() -> None:
    machines = list(grid())
    assert {each.bus for each in machines} >= {3e9, 50e9}
    assert {each.cores for each in machines} >= {2, 32}
    assert {each.resident for each in machines} >= {0.0, 0.9}
    assert {each.programs for each in machines} == {0, 3}
