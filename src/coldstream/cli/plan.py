"""`coldstream plan`: what goes where under a budget, the speed to expect, and what more memory would add."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from coldstream.cli.model_argument import complete_model, model_or_bundled
from coldstream.cli.options import (
    check_writable,
    common_options,
    engine_config,
    engine_options,
    parse_layer_weights,
    parse_number_or_auto,
    parse_size,
)
from coldstream.cli.tables import print_table
from coldstream.cli.terminal import ProgressLine, described_age, format_bytes, note
from coldstream.experts.cpu_share import layers_of_cpu
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.placement.control import CONTRADICTED
from coldstream.placement.controls import Controls, Moves
from coldstream.placement.cost import GUESSED, unstamped_seconds
from coldstream.placement.forecast import Forecast, forecast, rates_used, shares_used
from coldstream.placement.hardware_file import CPU_RATES, age_days, entries_of
from coldstream.placement.plan import PlacementPlan, PlanOptions
from coldstream.placement.plan_file import plan_to_json, save_plan
from coldstream.placement.pool_plan import PoolPlan
from coldstream.placement.run_file import LastRun, decode_of, described, last_runs, runs_path
from coldstream.placement.run_plan import RunPlan

if TYPE_CHECKING:
    from coldstream.planning.planned import Planned

_PART_NAMES = {
    "weights": "weights of every token",
    "caches": "keys, values, states",
    "workspace": "workspace",
    "drafter": "draft model",
    "prompt_cache": "kept prefixes of prompts",
    "graphs": "captured steps",
    "reserve": "the driver's reserve",
}
_FAST_NAMES = {"vram": "GPU memory", "ram": "RAM"}
_MOVES: Final = {
    Moves.ALWAYS: "both shares and the number of threads follow what steps of one token take",
    Moves.IF_CONTRADICTED: "both shares and the number of threads stay, until steps of one token take "
    f"{CONTRADICTED:g} times as long for an expert as at first, or as short: then they follow that",
}
WORTHWHILE = 1.2  # times as fast are prompts with what is worth a line
_SLOW_NAMES = {"vram": "RAM", "ram": "disk"}


@click.command("plan", short_help="Show what goes where, and the speed to expect.")
@click.argument("model", required=False, shell_complete=complete_model)
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    metavar="TRACE",
    help="A file that `coldstream profile` wrote: which experts are used most.",
)
@click.option(
    "--pin-layers",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Layers whose experts all stay in fast memory: the first, the last, then from the second on.",
)
@click.option(
    "--layer-weights",
    type=parse_layer_weights,
    metavar="LAYERS=WEIGHT,…",
    help="What a use of an expert of these layers counts for where experts compete for fast memory, for "
    "example 0-5=2,37-39=2 [default: 1].",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the plan to FILE, for --plan of run and bench.",
)
@click.option(
    "--measure", is_flag=True, help="Measure this machine again, instead of taking the rates that were kept."
)
@click.option(
    "--prompt-cache",
    "prompt_cache_bytes",
    type=parse_size,
    default="0",
    metavar="SIZE",
    help="RAM that `coldstream serve` keeps prefixes of prompts in, of --ram.",
)
@click.option(
    "--parallel",
    type=parse_number_or_auto,
    default="1",
    metavar="N|auto",
    help="Whole contexts that there is memory for; auto: as many as `coldstream serve` has by default.",
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the tables.")
@engine_options
@common_options
def command(
    model: str | None,
    profile: Path | None,
    pin_layers: int,
    layer_weights: tuple[tuple[int, float], ...] | None,
    out: Path | None,
    measure: bool,
    prompt_cache_bytes: int,
    parallel: int | str,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan the memory for MODEL, whose weights are not read. Without MODEL: the bundled demo model.

    With --vram the plan is for a GPU, also on a machine that has none; what could not be measured is assumed
    and named.
    """
    # Imported here because planning is not needed to show how the verb is used.
    from coldstream.planning.gather import plan_by_name

    config = engine_config(model_or_bundled(model), {**options, "parallel": parallel})
    chosen = PlanOptions(num_pinned_layers=pin_layers, layer_weights=layer_weights or ())
    check_writable(out, "--out")  # better said now than after the work
    with ProgressLine() as line:
        planned = plan_by_name(
            config, chosen, profile, line.update, measure=measure, prompt_cache_bytes=prompt_cache_bytes
        )
    for warning in planned.warnings:
        note(f"warning: {warning}")
    plan, known = planned.plan, planned.known
    pool = planned.run.pool
    expected = forecast(plan, known, pool=pool)
    richer = forecast(planned.larger_plan, known, pool=pool) if planned.larger_plan else None
    more_ram = forecast(plan, known, pool=planned.more_ram.pool) if planned.more_ram else None
    faster = forecast(planned.longer_steps, known, pool=pool) if planned.longer_steps else None
    if out is not None:
        save_plan(planned.run, out)
    if as_json:
        click.echo(json.dumps(_document(planned, expected, richer, more_ram, faster)))
        return
    _print_places(planned.run, is_dense=known.model.is_dense)
    if pool is None:
        _print_speeds(expected, {"with 1 GiB more": richer})
    else:
        _print_speeds(expected, {"1 GiB more on GPU": richer, "1 GiB more RAM": more_ram}, has_disk=True)
    note(f"drafts: {planned.draft_reason}")
    if faster is not None and (steps := _described_steps(planned, expected, faster)):
        note(steps)
    if planned.run.threads and not plan.is_all_resident and plan.tier == "vram":
        describe = _described_layers if known.model.is_dense else _described_misses
        note(describe(planned.run))
        if planned.run.miss_times is not None and not known.model.is_dense:
            note(_MOVES[Controls.of(planned.hardware).shares])
    if plan.layer_weights:
        note(f"a use of an expert counts for {_described(plan.layer_weights, known.model.placed_layers)}")
    if not plan.is_all_resident and not known.model.is_dense:
        note(f"hit rates: {known.curve.source}")
    runs = _described_runs(planned, expected)
    for about in (*runs, *_described_rates(planned), *_described_estimates(planned)):
        note(about)


def _described_rates(planned: "Planned") -> Iterator[str]:
    """The rates of the forecast, with when they were measured, and what disturbed that."""
    rates, used = planned.known.rates, rates_used(planned.plan, planned.run.pool)
    of_cpu = [name for name in used if name in CPU_RATES]
    names = {"cpu": of_cpu, "gpu": [name for name in used if name not in of_cpu]}
    entries = entries_of(planned.hardware)
    if len({(entry.measured_at, entry.problems) for entry in entries}) == 1:
        names, entries = {entries[0].name: [*used]}, entries[:1]
    now = datetime.now(UTC)
    for entry in entries:
        if text := rates.describe_measured(names[entry.name]):
            age = described_age(age_days(entry.measured_at, now))
            yield f"measured {entry.measured_at}, {age}: {text}; --measure does it again"
            if entry.problems:
                follows = (
                    "so it is a starting point: a later start measures again, once other programs rest"
                    if entry.is_due
                    else "as were others before it, of which the best rates stay: close other programs first"
                )
                yield f"that was under load ({', '.join(entry.problems)}), {follows}"


def _described_estimates(planned: "Planned") -> Iterator[str]:
    """What the forecast takes that was not measured here."""
    rates, plan, pool = planned.known.rates, planned.plan, planned.run.pool
    if assumed := rates.describe_assumed(rates_used(plan, pool)):
        yield f"not measured on this machine but assumed: {assumed}"
    if estimated := rates.shares.describe_estimated(shares_used(plan)):
        yield f"not measured on this machine but estimated by others: {estimated}"


def _described_runs(planned: "Planned", expected: Forecast) -> Iterator[str]:
    """What the last runs took with this file on this machine, beside what was expected."""
    path = runs_path()
    state, runs = last_runs(planned.hardware, planned.plan.model.fingerprint, path)
    if state == "damaged":
        yield f"warning: the kept runs in {path} are damaged, and left out until the next run replaces them"
    elif state == "unreadable":
        yield f"warning: the kept runs in {path} are unreadable, and left out: remove it"
    if found := _decode_of(runs, planned, expected):
        which = "run" if found[1] == 1 else f"{found[1]} runs"
        yield f"decoding as the last {which} with this plan went: {found[0]:.1f} tok/s"
    yield from map(described, runs)


def _decode_of(runs: Sequence[LastRun], planned: "Planned", expected: Forecast) -> tuple[float, int] | None:
    """See `decode_of`; None with a trace of routing, of which no run is kept."""
    if planned.trace is not None:
        return None
    unstamped_s = unstamped_seconds(planned.known.model, planned.known.rates)
    return decode_of(runs, planned.plan.budget_bytes, 1 / expected.decode, unstamped_s)


def _document(
    planned: "Planned",
    expected: Forecast,
    richer: Forecast | None,
    more_ram: Forecast | None,
    faster: Forecast | None,
) -> dict[str, Any]:
    """What --json prints. The last three: with more fast memory, with more RAM beside a GPU, and in the least
    memory in which a GPU's steps are long.
    """
    longer = planned.longer_steps
    _, runs = last_runs(planned.hardware, planned.plan.model.fingerprint, runs_path())
    seen = _decode_of(runs, planned, expected)
    return {
        "plan": json.loads(plan_to_json(planned.run)),
        "draft_reason": planned.draft_reason,
        "hardware": asdict(planned.hardware),
        "rates": asdict(planned.known.rates),
        "hit_rates_from": planned.known.curve.source,
        "last_runs": [asdict(run) for run in runs],
        "decode_of_last_runs": seen[0] if seen else None,
        "forecast": asdict(expected),
        "forecast_with_next_gib": asdict(richer) if richer else None,
        "forecast_with_next_gib_of_ram": asdict(more_ram) if more_ram else None,
        "vram_of_longer_steps": longer.budget_bytes if longer else None,
        "forecast_of_longer_steps": asdict(faster) if faster else None,
    }


def _print_places(run: RunPlan, *, is_dense: bool) -> None:
    """One row for each thing that takes memory."""
    plan = run.placement
    placed = "feed-forward networks" if is_dense else "experts"
    fast, slow = _FAST_NAMES[plan.tier], _SLOW_NAMES[plan.tier]
    rows = []
    ngrams = plan.fixed.host_ngrams
    ngram_row = "n-grams in use, of a table on the disk", "RAM", format_bytes(ngrams)
    for name, num_bytes in plan.fixed.parts.items():
        what = _PART_NAMES[name]
        if name == "weights" and plan.tier == "ram" and ngrams:
            rows += [(what, fast, format_bytes(num_bytes - ngrams)), ngram_row]
            continue
        if name == "caches":
            what += f" of {plan.fixed.ctx_size} tokens, {plan.fixed.kv_type}"
            if run.attention_window is not None:
                what += f", attending to {run.attention_window}"
        if num_bytes:
            rows.append((what, fast, format_bytes(num_bytes)))
        if name == "caches" and plan.fixed.window_caches:
            taken = format_bytes(plan.fixed.window_caches)
            what = f"  of that {taken} for layers with windows, in {plan.fixed.num_window_blocks} blocks"
            rows.append((what, "", ""))
    if plan.ring_bytes:
        what = "layers on their way" if is_dense else "experts on their way in prefill"
        rows.append((what, fast, format_bytes(plan.ring_bytes)))
    if run.prefetch:
        taken = format_bytes(run.prefetch_bytes)
        what = f"  of that {taken} for {run.prefetch} a layer fetched {run.layers_ahead} layers ahead"
        what += ", if steps show that it pays" if run.ahead == "later" else ""
        rows.append((what, "", ""))
    for size, count in plan.slots.items():
        if count:
            what = f"{count} {placed} of {size / 2**20:.2f} MiB"
            rows.append((what, fast, format_bytes(count * size)))
    rows.append(("free", fast, format_bytes(plan.budget_bytes - plan.total_bytes)))
    rows.append(("together", fast, format_bytes(plan.budget_bytes)))
    if plan.tier == "vram" and run.pool is None and run.prompt_cache_bytes:
        rows.append((_PART_NAMES["prompt_cache"], "RAM", format_bytes(run.prompt_cache_bytes)))
    if plan.fixed.host_tables and run.pool is None:
        rows.append(("embedding", "RAM", format_bytes(plan.fixed.host_tables)))
    if plan.tier == "vram" and ngrams and run.pool is None:
        rows.append(ngram_row)
    if run.pool is not None:
        rows += _rows_of_pool(plan, run.pool)
    elif num_cold := plan.num_all - plan.num_resident:
        rows.append((f"{num_cold} of {plan.num_all} {placed}", slow, format_bytes(plan.cold_bytes)))
    print_table(("what", "where", "size"), rows, left=("what", "where"))


def _rows_of_pool(plan: PlacementPlan, pool: PoolPlan) -> list[tuple[str, str, str]]:
    """What is in RAM beside a GPU, and on the disk."""
    names = {
        "buffers": "requests to the CPU, experts on their way, embedding, n-grams",
        "workspace": "workspace of the CPU's threads",
        "reserve": "reserve of the driver and the program",
        "prompt_cache": _PART_NAMES["prompt_cache"],
    }
    parts = asdict(pool.fixed)
    rows = [(names[name], "RAM", format_bytes(size)) for name, size in parts.items() if size]
    for size, count in pool.slots.items():
        rows.append((f"{count} experts of {size / 2**20:.2f} MiB", "RAM", format_bytes(count * size)))
    rows.append(("free", "RAM", format_bytes(pool.budget_bytes - pool.total_bytes)))
    rows.append(("together", "RAM", format_bytes(pool.budget_bytes)))
    both = zip(plan.resident, pool.loaded, strict=True)
    missing = [plan.model.num_experts - len({*on_gpu, *in_ram}) for on_gpu, in_ram in both]
    if any(missing):
        num_bytes = sum(count * size for count, size in zip(missing, plan.expert_bytes, strict=True))
        rows.append((f"{sum(missing)} of {plan.num_all} experts", "disk", format_bytes(num_bytes)))
    return rows


def _described_steps(planned: "Planned", expected: Forecast, faster: Forecast) -> str | None:
    """What a little more memory does for prompts; None if that is not much."""
    plan, longer = planned.plan, planned.longer_steps
    length = max(expected.prefill, default=0)
    if longer is None or not length or faster.prefill[length] < WORTHWHILE * expected.prefill[length]:
        return None
    more = format_bytes(longer.budget_bytes - plan.budget_bytes)
    return (
        f"prompts go in steps of {plan.fixed.chunk_size} tokens. In steps of {longer.fixed.chunk_size}, with "
        f"{more} more (--vram {longer.budget_bytes // 2**20}M), {length} tokens would take "
        f"{length / faster.prefill[length]:.2f} s instead of {length / expected.prefill[length]:.2f}"
    )


def _described_misses(run: RunPlan) -> str:
    """What is done about experts that are not in the GPU's memory."""
    threads = f"{run.threads} CPU threads compute"
    num_chosen = run.placement.model.num_experts_per_tok
    times = run.miss_times
    fetched: tuple[int, ...] = ()
    if times is not None and run.ahead != "later":
        fetches = times.by_fetches(num_chosen, GUESSED)[1:]
        fetched = tuple(min(each, run.prefetch) for each in fetches)
    if any(fetched):
        missed = f"of 1, 2, … experts that a layer of a token misses {', '.join(map(str, fetched))}"
        first = f"{missed} come over the bus before their router has run, {threads} the others"
    elif times is not None:
        by_bus = ", ".join(map(str, times.by_misses(num_chosen)[1:]))
        missed = f"of 1, 2, … experts that a token misses {by_bus} come over the bus"
        first = f"{missed} at first, {threads} the others"
    else:
        first = f"{threads} all experts that a token misses, in RAM"
    return (
        f"{first}, and some of prompts in steps of up to {run.max_cpu_rows} tokens; up to "
        f"{format_bytes(run.copy_bytes_per_step)} of experts are copied into slots beside a step"
    )


def _described_layers(run: RunPlan) -> str:
    """What is done about layers of a dense model that are not in the GPU's memory."""
    assert run.miss_times is not None, "a dense model on a GPU has times of its missing layers"
    missing = run.placement.num_all - run.placement.num_resident
    by_cpu = ", ".join(
        f"{len(layers_of_cpu(missing, rows, run.miss_times))} with {rows}"
        for rows in (1, 8, MAX_MAILBOX_ROWS)
    )
    return (
        f"of the {missing} missing networks {run.threads} CPU threads compute {by_cpu} tokens in a step, and "
        "the others are copied over the bus"
    )


def _described(layer_weights: Sequence[float], numbers: Sequence[int]) -> str:
    """What is not 1 of the weights of layers. numbers: the model's of these layers."""
    runs = []
    for weight, run in groupby(zip(layer_weights, numbers, strict=True), itemgetter(0)):
        first, *others = (number for _, number in run)
        layers = f"layers {first} to {others[-1]}" if others else f"layer {first}"
        if weight != 1:
            runs.append(f"{weight:g} in {layers}")
    return ", ".join(runs)


def _print_speeds(
    expected: Forecast, others: Mapping[str, Forecast | None], *, has_disk: bool = False
) -> None:
    """Speeds in tokens per second, what bounds them, and those with more memory, by name.

    has_disk: whether some of the experts that a GPU lacks are on the disk.
    """
    richer = {name: one for name, one in others.items() if one is not None}
    more = list(richer.values())

    def row(name: str, of: Callable[[Forecast], str], ceiling: str = "") -> list[str]:
        return [name, of(expected), ceiling, *map(of, more)]

    rows = [
        row("hit rate", lambda one: f"{one.hit_rate:.1%}"),
        *([row("from the disk", lambda one: f"{one.disk_rate:.1%}")] if has_disk else []),
        row("decode, tok/s", lambda one: f"{one.decode:.1f}", f"{expected.decode_ceiling:.1f}"),
    ]
    if expected.prefetch_gain_s:
        rows.append(row("saved by prefetching, µs a token", _prefetch_gain))
    for length, ceiling in expected.prefill_ceiling.items():
        speed = partial(_prefill_speed, length)
        rows.append(row(f"prefill of {length}, tok/s", speed, f"{ceiling:.0f}"))
    columns = ("expected", "of this plan", "at most", *richer)
    print_table(columns, rows, left=("expected",))


def _prefetch_gain(forecast: Forecast) -> str:
    return f"{forecast.prefetch_gain_s * 1e6:.0f}" if forecast.prefetch_gain_s > 0 else "none"


def _prefill_speed(length: int, forecast: Forecast) -> str:
    return f"{forecast.prefill[length]:.0f}"
