"""`coldstream bench`: the ceiling that memory sets, then llama-bench's table of what is reached."""

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from coldstream.cli.model_argument import complete_model, model_or_bundled
from coldstream.cli.options import (
    Command,
    check_writable,
    common_options,
    engine_config,
    engine_options,
    parse_counts,
)
from coldstream.cli.tables import print_table
from coldstream.cli.terminal import ProgressLine, format_bytes, format_count, note, visible
from coldstream.engine import OpenedModel, open_model
from coldstream.engine.benchmark import (
    BenchmarkResult,
    BenchmarkTest,
    benchmark_tokens,
    run_benchmark,
    times_as_forecast,
)
from coldstream.engine.draft_benchmark import DraftedResult, DraftedTest, run_drafted
from coldstream.errors import ConfigError
from coldstream.experts.cpu.disk_tier import DiskStatistics
from coldstream.experts.gpu_statistics import GpuExpertStatistics, StepTimes, describe_parts, describe_shares
from coldstream.experts.prefetch import PrefetchStatistics
from coldstream.garbage import starting
from coldstream.kernels.cuda.device import find_gpu, measure_copy_bandwidth
from coldstream.models.footprint import bytes_per_token, num_parameters
from coldstream.placement.forecast import forecast
from coldstream.placement.hardware import Hardware
from coldstream.planning.machine import reconsider_rates


def _counts(name: str, short: str, default: str, text: str) -> Callable[[Command], Command]:
    return click.option(
        name, short, type=parse_counts, metavar="N,N…", default=default, show_default=True, help=text
    )


def _number(
    name: str, short: str, default: int, kind: click.IntRange, text: str
) -> Callable[[Command], Command]:
    return click.option(name, short, type=kind, metavar="N", default=default, show_default=True, help=text)


@click.command("bench", short_help="Measure prefill and decode speed.")
@click.argument("model", required=False, shell_complete=complete_model)
@_counts("--n-prompt", "-p", "512", "Prefill so many tokens; 0: no such test.")
@_counts("--n-gen", "-n", "128", "Decode so many tokens; 0: no such test.")
@_counts("--n-depth", "-d", "0", "Do so after so many others.")
@_number("--repetitions", "-r", 5, click.IntRange(1, 1000), "Runs of each test that are counted.")
@_number("--seed", "-s", 0, click.IntRange(0, 2**31), "Which part of the text is read.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
@click.option(
    "--report",
    "report_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write what the issue form for numbers from your rig asks for to FILE.",
)
@engine_options
@common_options
def command(
    model: str | None,
    n_prompt: tuple[int, ...],
    n_gen: tuple[int, ...],
    n_depth: tuple[int, ...],
    repetitions: int,
    seed: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Time prefill (pp) and decode (tg) of MODEL on real text, after one run that isn't counted.

    Choosing tokens is part of the times, tokenising is not. Without MODEL: the bundled demo model.
    """
    tests = [BenchmarkTest(n, 0, depth) for depth in n_depth for n in n_prompt if n]
    tests += [BenchmarkTest(0, n, depth) for depth in n_depth for n in n_gen if n]
    if not tests:
        raise click.UsageError("nothing to measure: give -p or -n a number above 0")
    drafted = [DraftedTest(test) for test in tests if test.num_generated]
    check_writable(options["report_path"], "--report")
    if options["ctx_size"] is None and options["plan"] is None:
        # Whether anything drafts is known once the model is open.
        options["ctx_size"] = max(_num_tokens([*tests, *drafted]))
    with ProgressLine() as line, starting():
        opened = open_model(engine_config(model_or_bundled(model), options), progress=line.update)
    for warning in opened.warnings:
        note(f"warning: {warning}")
    try:
        drafted = drafted if opened.speculation else []
        _check_room([*tests, *drafted], opened.config.ctx_size or 0)
        report = _Report(opened)
        if not as_json:
            click.echo(report.describe_ceiling())
        results = _run_all(opened, tests, repetitions, seed)
        drafts = _run_drafted(opened, drafted, repetitions, seed)
        disk, on_gpu = opened.runner.disk, opened.runner.gpu_experts
    finally:
        opened.close()
    reconsider_rates(opened.planned.hardware, partial(report.times_as_fast, results))
    experts = {
        "experts_on_disk": asdict(disk) if disk else None,
        "experts_on_gpu": asdict(on_gpu) if on_gpu else None,
        "drafts": [drafts_to_json(result) for result in drafts],
    }
    document = json.dumps(report.to_json(results, seed) | experts)
    remarks = [*map(describe_drafts, drafts), *_describe_experts(disk, on_gpu)]
    if as_json:
        click.echo(document)
    else:
        report.print_table(results)
        for remark in remarks:
            click.echo(remark)
    if options["report_path"] is not None:
        report.write(options["report_path"], results, (report.describe_ceiling(), *remarks), document)


def _describe_experts(disk: DiskStatistics | None, on_gpu: GpuExpertStatistics | None) -> list[str]:
    """A line for each thing that is known of experts that were not all in fast memory."""
    lines = [describe_disk(disk)] if disk else []
    if on_gpu:
        lines.append(describe_gpu(on_gpu))
        if on_gpu.step_times.steps:
            lines.append(describe_times(on_gpu.step_times))
        if on_gpu.shares and on_gpu.shares.updates:
            lines.append(describe_shares(on_gpu.shares))
        if on_gpu.prefetch:
            lines.append(describe_prefetch(on_gpu.prefetch))
    return lines


def _check_room(tests: Sequence[BenchmarkTest | DraftedTest], ctx_size: int) -> None:
    """ConfigError, before anything is measured, if a test needs more context than there is."""
    largest = tests[int(np.argmax(_num_tokens(tests)))]
    if largest.num_tokens > ctx_size:
        raise ConfigError(
            f"{largest.name} needs a context of {largest.num_tokens} tokens, there are {ctx_size}: choose "
            "smaller tests with -p, -n and -d, or a larger --ctx-size (of `coldstream plan`, where there is "
            "a --plan)"
        )


def _num_tokens(tests: Sequence[BenchmarkTest | DraftedTest]) -> list[int]:
    return [test.num_tokens for test in tests]


def describe_drafts(result: DraftedResult) -> str:
    """What drafts brought, in one line."""
    found = result.speculation
    uses = found.experts_per_draft
    times = {
        "drafting": found.draft_s,
        "building trees": found.build_s,
        "sizing them": found.size_s,
        "steps": found.verify_s,
        "choosing": found.choose_s,
    }
    shown = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in times.items())
    return (
        f"{result.test.name}: {result.mean:.2f} t/s, {result.mean / result.plain_mean:.2f} times as fast as "
        f"without drafts; {found.drafter} gave {found.accepted_per_draft:.2f} tokens a draft, "
        f"{found.tokens_per_step:.2f} a step; {shown}"
        + (f"; {uses[0]:.0f} experts a draft, {uses[1]:.0f} not at hand" if uses else "")
    )


def drafts_to_json(result: DraftedResult) -> dict[str, Any]:
    """The same as plain values. Speeds are tokens per second."""
    found = result.speculation
    return {
        "test": result.test.name,
        "samples": list(result.samples),
        "plain_samples": list(result.plain_samples),
        "accepted_per_draft": found.accepted_per_draft,
        "tokens_per_step": found.tokens_per_step,
        **asdict(found),
    }


def describe_disk(disk: DiskStatistics) -> str:
    """Where experts were found, in one line."""
    return (
        f"{disk.num_slots} of {disk.num_experts} experts fit into RAM; {disk.hit_rate:.0%} of their uses "
        f"found them there, {disk.bytes_read / 1e9:.2f} GB were read, {disk.wait_s:.2f} s waited for the disk"
    )


def describe_prefetch(prefetch: PrefetchStatistics) -> str:
    """The recall of guesses and the use of prefetched experts, in one line."""
    return (
        f"{prefetch.recall:.0%} of their uses were guessed; {sum(prefetch.fetched)} experts were fetched "
        f"ahead, of which {sum(prefetch.used)} were used, {sum(prefetch.given_up)} came too late, and "
        f"{(sum(prefetch.wasted_bytes) + sum(prefetch.given_up_bytes)) / 1e9:.2f} GB at most were for nothing"
    )


def describe_gpu(experts: GpuExpertStatistics) -> str:
    """Where experts were found on a GPU that does not hold all of them, in one line."""
    return (
        f"{experts.num_slots} of {experts.num_experts} experts fit into the GPU's memory; "
        f"{experts.hit_rate:.0%} of their uses by decoded tokens found them there, "
        f"{sum(experts.copied_bytes) / 1e9:.2f} GB were copied, the CPU computed {sum(experts.cpu_pairs)} in "
        f"{sum(experts.cpu_s):.2f} s; of prompts {sum(experts.prompt_streamed)} came over the bus, "
        f"{sum(experts.prompt_on_cpu)} went to the CPU"
    )


def describe_times(times: StepTimes) -> str:
    """Where the layers of decoded tokens spent their time."""
    return (
        f"a token's layers take {1e3 * times.seconds / times.steps:.2f} ms on the GPU: "
        f"{describe_parts(times.parts)}"
    )


class _Report:
    """The results of a run, as text and as JSON."""

    def __init__(self, opened: OpenedModel) -> None:
        runner = opened.runner
        tensors = runner.file.tensors
        self._name = str(runner.file.metadata.readable.get("general.name") or runner.file.paths[0].stem)
        self._size_bytes = runner.file.num_bytes
        self._parameters = num_parameters(tensors.values())
        self._tier, self._threads = runner.tier, runner.threads
        self._weight_bytes = bytes_per_token(runner.spec, tensors)
        self._planned, self._device = opened.planned, opened.config.device
        if self._device == "cuda":
            self._machine, self._bandwidth = find_gpu().name, measure_copy_bandwidth()
        else:
            hardware = Hardware.measure().with_bandwidth(runner.threads)
            assert hardware.read_bytes_per_s is not None
            self._machine, self._bandwidth = hardware.cpu_name, hardware.read_bytes_per_s

    def ceiling(self, test: BenchmarkTest) -> float | None:
        """Tokens per second at which reading weights and cache takes all bandwidth; None for prefill."""
        if test.num_prompt:
            return None
        return self._bandwidth / (self._weight_bytes + self._planned.sizes.cached_bytes(test.mean_context))

    def times_as_fast(self, results: Sequence[BenchmarkResult], hardware: Hardware) -> float:
        """How many times as fast as the rates of `hardware` explain the device's memory was read, or a test
        decoded: than forecast on a GPU, and than weights in RAM can be read on a CPU.
        """
        if hardware.gpu:
            assert hardware.gpu.copy_bytes_per_s, "these are measured rates"
            read = self._bandwidth / hardware.gpu.copy_bytes_per_s
            return max(read, times_as_forecast(self._planned, hardware, results))
        assert hardware.read_bytes_per_s, "these are measured rates"
        in_ram = self._planned.plan.is_all_resident
        decoded = [result.mean for result in results if in_ram and result.test.num_generated]
        return (
            max([self._bandwidth, *(mean * self._weight_bytes for mean in decoded)])
            / hardware.read_bytes_per_s
        )

    def describe_ceiling(self) -> str:
        """What bounds decoding, in one line."""
        bound = self._bandwidth / self._weight_bytes
        reader = "the GPU copies" if self._device == "cuda" else f"{self._threads} threads read"
        return (
            f"decode reads {self._weight_bytes / 1e6:.1f} MB of weights a token; "
            f"{reader} {self._bandwidth / 1e9:.1f} GB/s: at most {bound:.1f} tok/s"
        )

    def print_table(self, results: Sequence[BenchmarkResult]) -> None:
        """One row per test, in llama-bench's columns, and the share of the ceiling."""
        rows = []
        for result in results:
            ceiling = self.ceiling(result.test)
            rows.append(
                (
                    visible(self._name),
                    format_bytes(self._size_bytes),
                    format_count(self._parameters),
                    "CUDA" if self._device == "cuda" else f"CPU {self._tier}",
                    str(self._threads),
                    result.test.name,
                    f"{result.mean:.2f} ± {result.deviation:.2f}",
                    f"{result.mean / ceiling:.0%}" if ceiling else "",
                )
            )
        columns = ("model", "size", "params", "backend", "threads", "test", "t/s", "of ceiling")
        print_table(columns, rows, left=("model", "backend"), markdown=True)

    def write(
        self, path: Path, results: Sequence[BenchmarkResult], notes: tuple[str, ...], document: str
    ) -> None:
        """The report for others, with the plan's forecasts."""
        # Imported here because few runs write one.
        from coldstream.cli.rig_report import Figure, RigReport, describe_model, given_settings, write_report

        figures = tuple(
            Figure(
                result.test.name,
                f"{result.mean:.2f} ± {result.deviation:.2f} tok/s",
                "" if (expected := self.forecast(result.test)) is None else f"{expected:.1f} tok/s",
            )
            for result in results
        )
        settings = given_settings(click.get_current_context())
        described = f"{describe_model(self._name, self._size_bytes)}, {format_count(self._parameters)}"
        write_report(RigReport("bench", settings, described, figures, notes, document), path)

    def forecast(self, test: BenchmarkTest) -> float | None:
        """Tokens per second that the plan expects; None for prompts of a length that it has none for."""
        planned, context = self._planned, test.mean_context if test.num_generated else 0
        expected = forecast(planned.plan, planned.known, context, planned.run.pool)
        if test.num_generated:
            return expected.decode
        return None if test.depth else expected.prefill.get(test.num_prompt)

    def to_json(self, results: Sequence[BenchmarkResult], seed: int) -> dict[str, Any]:
        """The same as plain values. Speeds are tokens per second."""
        return {
            "model": self._name,
            "size_bytes": self._size_bytes,
            "parameters": self._parameters,
            "backend": "CUDA" if self._device == "cuda" else "CPU",
            "tier": self._tier,
            "threads": self._threads,
            "machine": self._machine,
            "read_bytes_per_s": self._bandwidth,
            "weight_bytes_per_token": self._weight_bytes,
            "text": f"standard library of Python {platform.python_version()}",
            "seed": seed,
            "warm_up_runs": 1,
            "tests": [
                {
                    "test": result.test.name,
                    "tokens_per_s_mean": result.mean,
                    "tokens_per_s_sd": result.deviation,
                    "samples": list(result.samples),
                    "ceiling_tokens_per_s": self.ceiling(result.test),
                }
                for result in results
            ],
        }


def _run_all(
    opened: OpenedModel, tests: Sequence[BenchmarkTest], repetitions: int, seed: int
) -> list[BenchmarkResult]:
    token_ids = benchmark_tokens(opened.tokenizer, max(test.num_tokens for test in tests), seed)
    results = []
    with ProgressLine() as line:
        for test in tests:
            report = partial(line.update, test.name, total=repetitions + 1)
            results.append(run_benchmark(opened, token_ids, test, repetitions, report))
    return results


def _run_drafted(
    opened: OpenedModel, tests: Sequence[DraftedTest], repetitions: int, seed: int
) -> list[DraftedResult]:
    if not tests:
        return []
    token_ids = benchmark_tokens(opened.tokenizer, max(test.num_prompt for test in tests), seed)
    with ProgressLine() as line:
        return [
            run_drafted(
                opened,
                token_ids,
                test,
                repetitions,
                partial(line.update, test.name, total=repetitions + 1),
            )
            for test in tests
        ]
