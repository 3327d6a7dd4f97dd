"""The stages of a start, as `--verbose` shows them."""

import subprocess
import sys
import time
from pathlib import Path

from coldstream.assets import demo_model_path
from coldstream.cli.start_times import StartTimes, process_age_s
from coldstream.engine import EngineConfig, open_model

AGE = "from coldstream.cli.start_times import process_age_s; print(process_age_s())"


def test_stages_come_in_the_order_of_their_beginnings_and_are_passed_on() -> None:
    ages = iter((1.0, 2.0, 3.0, 4.0, 5.0))
    shown: list[tuple[str, int, int]] = []
    times = StartTimes(lambda *update: shown.append(update), lambda: next(ages))
    updates = [("planning", 0, 1), ("compiling", 0, 2), ("loading", 0, 9), ("compiling", 2, 2)]
    for update in updates:
        times.update(*update)
    assert shown == updates
    assert times.report().splitlines()[1:] == [
        "  0.00  importing",
        "  1.00  planning",
        "  2.00  compiling, last heard of at 4.00",
        "  3.00  loading",
        "  5.00  ready",
    ]


def test_every_stage_of_opening_a_model_is_heard_of_before_it_is_over() -> None:
    times, heard = StartTimes(lambda what, done, total: heard.append(what)), list[str]()
    config = EngineConfig(str(demo_model_path()), device="cpu", threads=1, ctx_size=256)
    open_model(config, progress=times.update).close()
    named = [line.split("  ")[-1].partition(",")[0] for line in times.report().splitlines()[1:]]
    assert named == ["importing", *dict.fromkeys(heard), "ready"]
    stages = [
        "looking for a device",
        "reading the header",
        "planning",
        "loading",
        "waiting for the vocabulary",
    ]
    assert [stage for stage in named if stage in stages] == stages


def test_the_age_of_a_process_is_that_since_its_start(tmp_path: Path) -> None:
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", AGE], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lived = time.perf_counter() - begin
    assert 0 < float(done.stdout) <= lived + 0.02  # a clock tick is 10 ms
    before, now = process_age_s(), time.perf_counter()
    assert process_age_s() - before <= time.perf_counter() - now + 1e-3
