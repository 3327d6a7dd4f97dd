"""The benchmark computes exactly what it says, on real text, and keeps rows by their test."""

from dataclasses import replace
from pathlib import Path

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
from coldstream.errors import InvalidRequestError
from coldstream.gguf.reader import GGUFFile
from coldstream.models.read_spec import read_spec
from coldstream.placement.forecast import forecast
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.planning.gather import Sources, plan_model
from hash_runner import HashRunner


@pytest.mark.parametrize(
    ("test", "name", "num_tokens"),
    [
        (BenchmarkTest(512, 0, 0), "pp512", 512),
        (BenchmarkTest(0, 128, 0), "tg128", 129),
        (BenchmarkTest(512, 0, 4096), "pp512 @ d4096", 4608),
        (BenchmarkTest(0, 16, 100), "tg16 @ d100", 117),
    ],
)
def test_names_are_llama_benchs(test: BenchmarkTest, name: str, num_tokens: int) -> None:
    assert (test.name, test.num_tokens) == (name, num_tokens)


@pytest.mark.parametrize("test", [BenchmarkTest(20, 0, 0), BenchmarkTest(20, 0, 7), BenchmarkTest(0, 5, 7)])
def test_trap_51_every_run_computes_the_same_tokens_after_one_warm_up(
    llm: LLM, runner: HashRunner, test: BenchmarkTest
) -> None:
    token_ids = list(range(1, 100))
    runs: list[int] = []
    result = run_benchmark(runner, token_ids, test, 3, runs.append)
    assert runs == [0, 1, 2, 3]
    assert result.test is test
    assert len(result.samples) == 3
    assert runner._contexts[-1] == token_ids[: test.num_tokens]
    assert runner.computed == 4 * test.num_tokens
    assert all(sample > 0 for sample in result.samples)


def test_too_little_text_is_refused(runner: HashRunner) -> None:
    with pytest.raises(InvalidRequestError, match="pp20 needs 20 tokens of text, there are 3"):
        run_benchmark(runner, [1, 2, 3], BenchmarkTest(20, 0, 0), 1, lambda run: None)


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
    runner: HashRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs take 1, 2, 4 and 8 seconds of a clock that the test turns."""
    now = 0.0
    durations = iter((1.0, 2.0, 4.0, 8.0))
    extend = runner.extend

    def slow(*arguments: object) -> object:
        nonlocal now
        now += next(durations)
        return extend(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "extend", slow)
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now)
    result = run_benchmark(runner, list(range(8)), BenchmarkTest(8, 0, 0), 3, lambda run: None)
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
