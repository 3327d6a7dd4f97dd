"""The benchmark of wrong rates: its cases, on the host's model of a GPU, and what it holds them to."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")

from bench.engine import wrong_rates
from bench.engine.wrong_rates import BEGINNINGS, Case, Foreign, Lengths, Machine, mean_rate, measure
from builders import Dims, write_gguf
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MissTimes
from host_device import HostDevice
from host_gpu import MACHINE, opened_on

DIMS = Dims(layers=2, hidden=128, experts=64, experts_used=3, expert_ffn=128, shared_ffn=64)
LENGTHS = Lengths(tokens=8, short=8, settled=4, window=4, quiet_s=0.1, load_s=0.1, after_s=0.1)
PARTLY = 456 << 20


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(wrong_rates, "FIRST_ID", 5)
    monkeypatch.setattr(wrong_rates, "PROMPT", 3)
    return write_gguf(tmp_path / "small.gguf", dims=DIMS)[0]


@pytest.mark.sharded(of="measurements")
def test_all_cases_decode_the_same_text_and_shares_move_only_where_they_are_to(
    compiled_for_the_host: HostDevice, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrong_rates, "COARSE", (0.0, 1.0))
    with opened_on(compiled_for_the_host):
        (row,) = measure(path, [None], LENGTHS, MACHINE)
    assert row["vram_bytes"] < PARTLY
    assert row["resident_experts"] < row["experts"]
    assert [each["case"] for each in row["moving"]] == [case.name for case in BEGINNINGS]
    for each in row["moving"]:
        assert len(each["windows"]) == LENGTHS.tokens // LENGTHS.window
        assert all(window["factors"] for window in each["windows"])
    by_share = {each["share"]: each["windows"][-1]["by_bus"] for each in row["fixed"]}
    assert by_share[0.0] == (0, 0, 0)
    assert by_share[1.0] == (1, 2, 3)
    assert not any(window["factors"] for each in row["fixed"] for window in each["windows"])
    best = [each["tok_s"] for each in row["fixed"] if each["case"] == row["best"]["case"]]
    assert row["best"]["tok_s"] == max(best)
    runs = row["load"]["runs"]
    assert [(run["moves"], run["moves_threads"]) for run in runs] == [
        (True, True),
        (True, False),
        (False, False),
    ]
    for run in runs:
        begun, ended = run["load_s"]
        assert LENGTHS.quiet_s <= begun < ended <= run["windows"][-1]["at"]
    assert row["load"]["processes"] == MACHINE.num_physical_cores // 2


@pytest.mark.sharded(of="measurements")
def test_another_text_is_no_result(compiled_for_the_host: HostDevice, path: Path) -> None:
    with opened_on(compiled_for_the_host):
        with wrong_rates.opened(path, PARTLY, LENGTHS) as llm:
            machine = Machine(llm, LENGTHS, (-1,))
            with pytest.raises(RuntimeError, match="the text depends on the division"):
                machine.measure(Case())
        with (
            wrong_rates.opened(path, 2**30, LENGTHS) as llm,
            pytest.raises(RuntimeError, match="smaller --vram"),
        ):
            Machine(llm, LENGTHS)


def test_shares_of_the_bus_are_those_that_a_case_names() -> None:
    planned = MissTimes(bus=60_000, cpu=(30_000,) * MAX_MAILBOX_ROWS, row_bus=50_000)
    for share in (0.0, 0.25, 0.5, 1.0):
        found = Case(share=share).times(planned).by_misses(8)[8]
        assert found == pytest.approx(8 * share, abs=1)
    assert Case().times(planned) == planned
    wrong = Case(cpu=10.0, bus=0.1).times(planned)
    assert (wrong.cpu[0], wrong.row_bus, wrong.bus) == (300_000, 5_000, 6_000)
    assert [case.name for case in (*BEGINNINGS[:2], Case(share=0.125))] == [
        "as planned",
        "CPU x10",
        "bus 12.5%",
    ]


def test_another_program_works_only_between_its_begin_and_its_end() -> None:
    with Foreign(1) as foreign:
        (process,) = foreign._processes
        foreign.begin(1.0)
        assert process.poll() is None
        foreign.end(3.0)
        assert (foreign.begun_at, foreign.ended_at) == (1.0, 3.0)
    assert process.returncode < 0


def test_a_mean_rate_is_that_of_all_tokens() -> None:
    windows: list[dict[str, Any]] = [{"tok_s": 16 / 1.0}, {"tok_s": 16 / 3.0}]
    assert mean_rate(windows) == pytest.approx(32 / 4.0)
