"""A machine is measured again while nobody asks, and a request waits for nothing of it."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_idle_unload import LIMITS, QUICK, SCRIPT, SetClock, Slept

from coldstream.assets import demo_model_path
from coldstream.engine import EngineConfig
from coldstream.errors import DeviceError
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.linear.cpu_rates import PRODUCT_ROWS
from coldstream.placement.conditions import MOST_TRIES, Conditions
from coldstream.placement.hardware import Hardware
from coldstream.placement.hardware_file import store_rates, with_stored_rates
from coldstream.planning import machine
from coldstream.server import rates_process
from coldstream.server.idle_rates import DONE, DUE, IDLE_S, LOOK_S, PAUSE_S, IdleRates, Outcome, RatesSettings
from coldstream.server.supervisor import Supervisor

KILLED = -9


class Scripted:
    """A process that measures until it is ended, by itself or by others."""

    def __init__(self) -> None:
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def runs(self) -> bool:
        return not self.code.done()

    def end(self, code: int) -> None:
        if self.runs:
            self.code.set_result(code)

    def kill(self) -> None:
        if not self.runs:
            raise ProcessLookupError
        self.end(KILLED)

    async def wait(self) -> int:
        return await asyncio.shield(self.code)


class Machine:
    """With other programs that are busy or not, and measurements that end when a test says so."""

    def __init__(self) -> None:
        self.clock = SetClock()
        self.clock.now = 0.0
        self.others_are_busy = False
        self.num_looks = 0
        self.begun: list[Scripted] = []

    def look(self) -> Callable[[], bool]:
        self.num_looks += 1
        return lambda: not self.others_are_busy

    async def begin(self, device: str) -> Scripted:
        assert device == "cpu"
        self.begun.append(Scripted())
        return self.begun[-1]

    @property
    def measures(self) -> bool:
        return bool(self.begun) and self.begun[-1].runs

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await turns()


async def turns() -> None:
    """What is due in the loop is done."""
    for _ in range(8):
        await asyncio.sleep(0)


EVENTS = st.lists(
    st.sampled_from(("ask", "answered", "busy", "quiet", "ends", "disturbed", "20", "60", "600")), max_size=60
)


@given(EVENTS)
def test_nothing_is_measured_while_a_request_runs_nor_soon_after_nor_beside_busy_programs(
    events: list[str],
) -> None:
    async def played() -> None:
        here, asked_at, is_asking = Machine(), 0.0, False
        rates = IdleRates(here.begin, here.look, here.clock.clock)
        running = asyncio.create_task(
            rates.run("cpu", lambda: 0.0 if is_asking else here.clock.now - asked_at)
        )
        await turns()
        for event in events:
            num_before = len(here.begun)
            match event:
                case "ask":
                    is_asking = True
                    rates.give_up()
                    assert not here.measures, "at once, before the loop goes on"
                case "answered":
                    is_asking, asked_at = False, here.clock.now
                case "busy" | "quiet":
                    here.others_are_busy = event == "busy"
                case "ends" if here.measures:
                    here.begun[-1].end(DONE)
                case "disturbed" if here.measures:
                    here.begun[-1].end(DUE)
                case "20" | "60" | "600":
                    here.clock.advance(float(event))
            await turns()
            if len(here.begun) > num_before:
                assert not is_asking
                assert here.clock.now - asked_at >= IDLE_S
                assert not here.others_are_busy
            assert not (here.measures and is_asking)
            assert running.done() == any(
                each.code.done() and each.code.result() == DONE for each in here.begun
            )
        if not running.done():
            is_asking, here.others_are_busy, asked_at = False, False, here.clock.now
            for _ in range(3):
                if not here.measures:
                    await here.pass_time(IDLE_S + PAUSE_S)
                    await here.pass_time(LOOK_S)
            assert here.measures, "in the end it is measured"
            here.begun[-1].end(DONE)
        assert await running == "measured"

    asyncio.run(played())


async def test_an_idle_server_looks_seldom_where_others_are_busy() -> None:
    here = Machine()
    here.others_are_busy = True
    rates = IdleRates(here.begin, here.look, here.clock.clock)
    running = asyncio.create_task(rates.run("cpu", lambda: here.clock.now))
    await turns()
    for _ in range(3600):
        await here.pass_time(1.0)
    assert 3600 / (PAUSE_S + IDLE_S) <= here.num_looks <= 1 + 3600 / PAUSE_S
    assert not here.begun
    running.cancel()


async def refused(device: str) -> Scripted:
    raise PermissionError


@pytest.mark.parametrize("code", [1, KILLED, None])
async def test_a_measurement_that_fails_is_the_last_and_so_is_one_that_cannot_begin(code: int | None) -> None:
    here = Machine()
    rates = IdleRates(refused if code is None else here.begin, here.look, here.clock.clock)
    running = asyncio.create_task(rates.run("cpu", lambda: here.clock.now))
    await turns()
    await here.pass_time(IDLE_S)
    await here.pass_time(LOOK_S)
    if code is not None:
        here.begun[-1].end(code)
    assert await running == "failed"


async def test_a_request_ends_a_servers_measurement_before_it_reaches_the_engine(tmp_path: Path) -> None:
    """The engine that was loaded last says that rates are due; the model sleeps in between."""
    here, outcomes = Machine(), list[Outcome]()
    script = tmp_path / "script"
    script.write_text("due")
    supervisor = Supervisor(
        EngineConfig(str(demo_model_path())),
        LIMITS,
        name="demo",
        policy=QUICK,
        idle_unload_s=10 * IDLE_S,
        clock=here.clock.clock,
        command=(sys.executable, str(SCRIPT), str(script)),
        rates=RatesSettings(here.begin, here.look, outcomes.append),
    )
    async with supervisor:
        slept = Slept(supervisor, here.clock, tmp_path, [])
        await supervisor.opened()
        await turns()

        async def idle() -> None:
            await here.pass_time(IDLE_S)
            await here.pass_time(LOOK_S)

        await idle()
        assert here.measures
        asking = slept.ask(1)
        await asyncio.sleep(0)
        assert not here.measures, "in the same turn of the loop as the request"
        assert await asking == "5 6 5 "
        await turns()
        await idle()
        assert here.measures
        here.clock.advance(9 * IDLE_S)
        await slept.until("sleeping")
        assert here.measures, "a model that is unloaded disturbs nothing"
        asking = slept.ask(2)
        await asyncio.sleep(0)
        assert not here.measures
        assert await asking == "5 6 5 "
        await turns()
        await idle()
        here.begun[-1].end(DONE)
        await turns()
        assert (len(here.begun), outcomes) == (3, ["measured"])


async def test_a_server_that_stops_leaves_no_measurement(tmp_path: Path) -> None:
    here = Machine()
    script = tmp_path / "script"
    script.write_text("due")
    async with Supervisor(
        EngineConfig(str(demo_model_path())),
        LIMITS,
        name="demo",
        clock=here.clock.clock,
        command=(sys.executable, str(SCRIPT), str(script)),
        rates=RatesSettings(here.begin, here.look),
    ) as supervisor:
        await supervisor.opened()
        await turns()
        await here.pass_time(IDLE_S)
        await here.pass_time(LOOK_S)
        assert here.measures
    assert not here.measures


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of rates that other programs disturbed."""
    path = tmp_path / "hardware.json"
    monkeypatch.setattr(machine, "default_path", lambda: path)
    monkeypatch.setattr(rates_process, "die_with", lambda parent: None)
    store_rates(measured(num_busy=1.0), path)
    return path


def measured(num_busy: float, rate: float = 1e9) -> Hardware:
    return replace(
        Hardware.measure(),
        read_bytes_per_s=rate,
        product_values_per_s=((1e9,) * len(PRODUCT_ROWS),) * len(QuantType),
        measured_at="2026-11-29 12:00 UTC",
        conditions=Conditions(2, num_busy),
    )


@pytest.mark.parametrize(
    ("num_busy", "codes"), [(1.0, [DUE] * (MOST_TRIES - 2) + [DONE, DONE]), (0.0, [DONE, DONE])]
)
def test_the_process_measures_until_nothing_disturbs_or_it_was_tried_often_enough(
    kept: Path, monkeypatch: pytest.MonkeyPatch, num_busy: float, codes: list[int]
) -> None:
    """As often as it is started: at most so many times for a machine that is never quiet."""
    monkeypatch.setattr(machine, "is_idle", lambda cpus: True)
    calls: list[float] = []

    def measure(hardware: Hardware, progress: object = None) -> Hardware:
        calls.append(num_busy)
        return measured(num_busy, rate=2e9)

    monkeypatch.setattr(machine, "measure_rates", measure)
    assert [rates_process.run(("cpu", str(os.getppid()))) for _ in codes] == codes
    assert len(calls) == codes.count(DUE) + 1, "what is done is not measured again"
    stored = with_stored_rates(Hardware.measure(), kept)
    assert stored is not None
    assert stored.read_bytes_per_s == 2e9


def test_the_process_leaves_the_rates_alone_beside_busy_programs_and_where_it_fails(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads(kept.read_text())
    monkeypatch.setattr(machine, "is_idle", lambda cpus: False)
    assert rates_process.run(("cpu", str(os.getppid()))) == DUE
    monkeypatch.setattr(machine, "is_idle", lambda cpus: True)

    def fail(hardware: Hardware, progress: object = None) -> Hardware:
        raise DeviceError("no memory for it")

    monkeypatch.setattr(machine, "measure_rates", fail)
    assert rates_process.run(("cpu", str(os.getppid()))) not in (DONE, DUE)
    assert json.loads(kept.read_text()) == before
