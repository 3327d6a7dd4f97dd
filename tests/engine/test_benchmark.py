"""The benchmark computes exactly what it says, on real text, and keeps rows by their test."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builders import write_gguf
from coldstream.engine import LLM, EngineConfig, benchmark
from coldstream.engine.benchmark import (
    BenchmarkResult,
    BenchmarkTest,
    benchmark_tokens,
    run_benchmark,
    times_as_forecast,
)
from coldstream.errors import GenerationFault, InvalidRequestError
from coldstream.gguf.reader import GGUFFile
from coldstream.kvcache import Batch
from coldstream.models.read_spec import read_spec
from coldstream.placement.forecast import forecast
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.planning.gather import Sources, plan_model
from hash_runner import HashRunner


@pytest.mark.parametrize(
    ("test", "name", "num_tokens"),
    [
        (BenchmarkTest(512, 0, 0), "pp512", 513),
        (BenchmarkTest(0, 128, 0), "tg128", 130),
        (BenchmarkTest(512, 0, 4096), "pp512 @ d4096", 4609),
        (BenchmarkTest(0, 16, 100), "tg16 @ d100", 118),
    ],
)
def test_names_are_llama_benchs(test: BenchmarkTest, name: str, num_tokens: int) -> None:
    assert (test.name, test.num_tokens) == (name, num_tokens)


@pytest.mark.parametrize(
    ("test", "num_rows"),
    [
        (BenchmarkTest(20, 0, 0), 20),
        (BenchmarkTest(20, 0, 40), 40 + 20),
        (BenchmarkTest(0, 5, 0), 1 + 5),
        (BenchmarkTest(0, 5, 40), 40 + 1 + 5),
    ],
)
def test_trap_51_every_run_computes_the_same_tokens_after_one_warm_up(
    llm: LLM, runner: HashRunner, test: BenchmarkTest, num_rows: int
) -> None:
    """What lies before the timed rows is computed once a run."""
    token_ids, free = list(range(1, 100)), runner.free
    runs, last = list[int](), list[list[int]]()

    def report(run: int) -> None:
        runs.append(run)
        last.append(runner._contexts[-1] if run else [])

    result = run_benchmark(llm.opened, token_ids, test, 3, report)
    assert runs == [0, 1, 2, 3]
    assert result.test is test
    assert len(result.samples) == 3
    computed, num_prompt = runner._contexts[-1], test.depth + (test.num_prompt or 1)
    assert last[1] == last[2] == last[3] == computed
    assert computed[:num_prompt] == token_ids[:num_prompt]
    assert len(computed) == num_prompt + test.num_generated
    assert runner.computed == 4 * num_rows
    assert all(sample > 0 for sample in result.samples)
    assert runner.free == free


def test_too_little_text_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="pp20 needs 21 tokens of text, there are 3"):
        run_benchmark(llm.opened, [1, 2, 3], BenchmarkTest(20, 0, 0), 1, lambda run: None)


def test_an_error_of_a_run_is_raised(llm: LLM, runner: HashRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_logits", lambda token_ids: np.full(320, np.nan, np.float32))
    with pytest.raises(GenerationFault):
        run_benchmark(llm.opened, list(range(9)), BenchmarkTest(8, 0, 0), 1, lambda run: None)


def test_the_text_is_real_fixed_by_its_seed_and_long_enough(llm: LLM) -> None:
    tokenizer = llm.opened.tokenizer
    first = benchmark_tokens(tokenizer, 3000, seed=0)
    assert len(first) >= 3000
    assert first == benchmark_tokens(tokenizer, 3000, seed=0)
    other = benchmark_tokens(tokenizer, 3000, seed=1)
    assert other[:3000] != first[:3000]
    assert "def " in tokenizer.decode(other[:3000])


def test_mean_and_deviation() -> None:
    test = BenchmarkTest(1, 0, 0)
    assert BenchmarkResult(test, (1.0, 2.0, 3.0)).mean == 2.0
    assert BenchmarkResult(test, (1.0, 2.0, 3.0)).deviation == 1.0
    assert BenchmarkResult(test, (5.0,)).deviation == 0.0


def test_the_run_that_warms_up_is_not_for_the_record(
    llm: LLM, runner: HashRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs take 1, 2, 4 and 8 seconds of a clock that the test turns."""
    now = 0.0
    durations = iter((1.0, 2.0, 4.0, 8.0))
    step = runner.step

    def slow(batch: Batch) -> object:
        nonlocal now
        now += next(durations)
        return step(batch)

    monkeypatch.setattr(runner, "step", slow)
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now)
    result = run_benchmark(llm.opened, list(range(9)), BenchmarkTest(8, 0, 0), 3, lambda run: None)
    assert result.samples == (4.0, 2.0, 1.0)


def test_decoding_is_compared_with_what_given_rates_let_expect(tmp_path: Path) -> None:
    """With a GPU's rates that are half as high, a run seems almost twice as fast."""
    gpu = GpuHardware("a GPU", "1.0", 2**35, 2**34, 1e9, 2e11, 2.5e7, 2e7, 3e7, 7e-6)
    machine = Hardware("a CPU", ("avx2",), 4, 4, 2**35, 2**33, 5e10, gpu)
    (path,) = write_gguf(tmp_path / "tiny.gguf")
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        planned = plan_model(EngineConfig("m", device="cuda", ctx_size=64), Sources(file, spec, machine))
    expected = forecast(planned.plan, planned.known, context=8).decode
    prompt = BenchmarkResult(BenchmarkTest(512, 0, 0), (1e9,))
    results = [prompt, *(BenchmarkResult(BenchmarkTest(0, 6, 4), (share * expected,)) for share in (2, 3))]
    assert times_as_forecast(planned, machine, results) == pytest.approx(3)
    slower = replace(machine, gpu=replace(gpu, copy_bytes_per_s=5e8))
    assert times_as_forecast(planned, slower, results) == pytest.approx(6, rel=0.1)
    assert times_as_forecast(planned, machine, [prompt]) == 0
