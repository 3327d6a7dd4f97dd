"""The present forecasts of `coldstream plan` beside runs that were measured before, without their machine.

    python -m bench.engine.forecast_again docs/results/gpu/mixes.json docs/results/gpu/hybrid_ahead.json
    python -m bench.engine.forecast_again docs/results/gpu/*streaming*.json --keep /tmp/headers

Reads results of plan_forecast.py, cpu_forecast.py, gpu_hybrid.py, gpu_streaming.py and desktop.py, which have
the rates of their machine.
The plan is made anew, of a file that has the right header and holes in place of its weights. Each line has
the commit that measured; the JSON has it beside the commit whose forecast this is. So a changed cost model
can be held against all machines that were ever measured. A figure of a program that did otherwise what is
forecast names the change since then.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.engine import cpu_forecast
from bench.engine.plan_forecast import Work, compared, expected
from bench.full_size_forecast import hardware_of, mean_context, mixers_of, steps_of
from bench.full_size_mixes import MIXES, PLAIN, Mix
from bench.full_size_model import FULL_SHAPE, FullSizeWriter
from bench.results import ROOT, add_result_options, write_result
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.experts.step_rates import StepRates
from coldstream.models.read_spec import read_spec
from coldstream.placement.forecast import Known, decode_forecast
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.hit_rates import PUBLISHED
from coldstream.placement.kernel_shares import KernelShares
from coldstream.placement.plan import FixedPart, PlanOptions, plan_placement
from coldstream.placement.prompt_cost import prefill_seconds
from coldstream.placement.rates import ESTIMATED, Rates
from coldstream.placement.sizes import ModelSizes
from coldstream.planning.config import EngineConfig
from coldstream.planning.facts import with_kv_type
from coldstream.planning.gather import Sources, bundled_profile, model_facts, plan_model
from coldstream.planning.planned import Planned

GIB = 2**30
KV_TYPE = "f16"
DECODE = "decode"
Row = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """Of what a step with missing experts does. rows: of the steps; one is decoding."""

    commit: str
    date: str
    rows: range

    def is_in(self, result: Row) -> bool:
        """Whether the program of a result had it, by its commit, or by the day where git does not know it."""
        known = contains(result["commit"].removesuffix("-changed"), self.commit)
        return self.date <= result["date"] if known is None else known


# A step that has changed so is no longer what is forecast.
CHANGES = (
    Change("b1eaf293", "2026-11-26", range(65, 513)),  # the device shares the experts out
    Change("c4d1ba0c", "2026-11-30", range(1, 2)),  # guessed experts are copied ahead
    Change("def0c648", "2026-11-30", range(513, 2049)),  # replayed in pieces, not launched one by one
    Change("88a9f11d", "2026-11-30", range(513, 2049)),  # copies ahead are of the next layer's guess
    Change("85e22d07", "2026-11-30", range(129, 513)),  # the host divides, and copies by that guess
)


def contains(commit: str, earlier: str) -> bool | None:
    """Whether a commit has another one behind it; None: git does not know both."""
    command = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", earlier, commit]
    try:
        status = subprocess.run(command, capture_output=True).returncode
    except OSError:
        return None
    return {0: True, 1: False}.get(status)


def older_than(figure: str, result: Row) -> str | None:
    """The last commit that has changed a figure with missing experts since a result; None: none has.

    figure: "decode…", or the tokens of a prompt.
    """
    rows = 1 if figure.startswith(DECODE) else int(figure)
    since = [each.commit for each in CHANGES if rows in each.rows and not each.is_in(result)]
    return since[-1] if since else None


@dataclass(frozen=True)
class Headers:
    """Files of the full-size shape without quantised weights, each written when it is first asked for."""

    folder: Path

    def of(self, mix: Mix, layers: int, vocab: int) -> Path:
        """The file of a mix."""
        path = self.folder / f"{mix.name}-{layers}-{vocab}.gguf"
        if not path.exists():
            shape = replace(FULL_SHAPE, layers=layers, vocab=vocab)
            writer = FullSizeWriter(path, shape, 0, len(os.sched_getaffinity(0)), mix=mix)
            writer.write(is_for_plans=True)
        return path

    def sizes(self) -> ModelSizes:
        """Of the full-size file on a GPU, of which the results of single files are."""
        with GGUFFile.open(self.of(PLAIN, FULL_SHAPE.layers, FULL_SHAPE.vocab)) as file:
            spec = read_spec(file.metadata, file.tensors)
            return with_kv_type(model_facts(file, spec).on_gpu, spec, KV_TYPE)


def rates_of(row: Row) -> Rates:
    """The rates that a row of plan_forecast.py names, as far as this version has them."""
    names = {each.name for each in fields(Rates)}
    found = {name: _as_tuple(value) for name, value in row["rates"].items() if name in names}
    if "mixers" in found:
        found["mixers"] = mixers_of(found["mixers"])
    if row.get("steps"):
        steps = steps_of(row["steps"], found["num_cores"])
        found["shares"] = KernelShares.of(
            machine_with(Rates(**found | {"shares": ESTIMATED}), _NO_GPU, steps)
        )
    elif "shares" in found:
        found["shares"] = KernelShares(**found["shares"])
    return Rates(**found)


def _as_tuple(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_tuple(part) for name, part in value.items()}
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


_NO_GPU: Row = {"cpu": "", "gpu": "", "driver": "", "gpu_memory_bytes": 1}  # nothing is asked about it


def machine_with(rates: Rates, machine: Row, steps: StepRates | None = None) -> Hardware:
    """A machine of such rates, with RAM for every file."""
    gpu = None
    if "gpu" in machine:
        memory = machine["gpu_memory_bytes"]
        gpu = GpuHardware(
            machine["gpu"],
            machine["driver"],
            memory,
            memory,
            rates.vram_bytes_per_s,
            rates.product_ops_per_s,
            rates.link_bytes_per_s,
            rates.link_beside_read,
            rates.read_beside_link,
            rates.handshake_s,
            rates.expert_bytes_per_s,
            steps=steps,
        )
    cores, ram = rates.num_cores, 128 * GIB
    by_type = rates.product_values_per_s
    read, mixers = rates.read_bytes_per_s, rates.mixers
    return Hardware(machine["cpu"], (), cores, cores, ram, ram, read, gpu, None, by_type, mixers=mixers)


def planned_again(path: Path, result: Row, row: Row, work: Work) -> Planned:
    """The plan of a row of plan_forecast.py."""
    has_gpu = row["budget"] is not None
    machine = {name: value for name, value in result["machine"].items() if has_gpu or name != "gpu"}
    hardware = machine_with(rates_of(row), machine)
    config = EngineConfig(
        str(path),
        device="cuda" if has_gpu else "cpu",
        vram=row["budget"] or "auto",
        ctx_size=work.ctx_size,
        spec_type="none",
    )
    with GGUFFile.open(path) as file:
        return plan_model(config, Sources(file, read_spec(file.metadata, file.tensors), hardware))


def of_mixes(result: Row, headers: Headers) -> Iterator[Row]:
    """Rows of plan_forecast.py."""
    work = Work(**result["work"])
    for name, mix in result["mixes"].items():
        path = headers.of(MIXES[name], result["layers"], result.get("vocab", FULL_SHAPE.vocab))
        for row in mix["rows"]:
            planned = planned_again(path, result, row, work)
            known = replace(planned.known, rates=rates_of(row))
            run = {figure: both["measured_tok_s"] for figure, both in row["figures"].items()}
            yield {
                "what": f"{name} {row['budget'] or ''}".strip(),
                "experts_share": planned.plan.resident_bytes / planned.sizes.all_expert_bytes,
                "measured_share": row["experts_share"],
                "figures": compared(expected(planned, known, work), run),
            }


def of_decoding(result: Row, headers: Headers) -> Iterator[Row]:
    """Rows of gpu_hybrid.py, where experts are missing also with the hit rate that was measured."""
    sizes, rates = headers.sizes(), Rates.of(hardware_of(result))
    for row in result["rows"]:
        share = row["experts_share"]
        known = Known(sizes, rates, PUBLISHED, may_prefetch=row["prefetch"] != 0)
        context = mean_context(row["depth"], result["warm_tokens"], result["timed_tokens"])

        def tok_s(hit_rate: float, known: Known = known, context: int = context) -> float:
            return 1 / decode_forecast(known, (hit_rate,) * sizes.num_layers, context)[0]

        found = {DECODE: tok_s(PUBLISHED.at(share) if share < 1.0 else 1.0)}
        if 0.0 < row["hit_rate"] < 1.0:
            found["decode with its hits"] = tok_s(row["hit_rate"])
        run = dict.fromkeys(found, row["tok_s"])
        yield {
            "what": f"{PLAIN.name} at {row['depth']}",
            "experts_share": share,
            "measured_share": share,
            "figures": compared(found, run),
        }


def of_prompts(result: Row, headers: Headers) -> Iterator[Row]:
    """Rows of gpu_streaming.py, those of a budget together."""
    sizes, rates = headers.sizes(), Rates.of(hardware_of(result))
    budgets = dict.fromkeys(row["experts_gib"] for row in result["rows"])
    for gib in budgets:
        resident = resident_with(sizes, gib)
        found, run = {}, {}
        for row in result["rows"]:
            if row["experts_gib"] == gib:
                name, tokens = str(row["tokens"]), row["tokens"]
                steps = {"chunk_size": result["chunk_size"], "ring_bytes": result["ring_bytes"]}
                seconds = prefill_seconds(sizes, rates, resident, None, tokens, **steps)
                found[name], run[name] = tokens / seconds, row["tok_s"]
        yield {
            "what": f"{PLAIN.name} {'all' if gib is None else f'{gib:g} GiB'}",
            "experts_share": float(resident.mean()),
            "measured_share": float(resident.mean()),
            "figures": compared(found, run),
        }


def of_desktop(result: Row, headers: Headers) -> Iterator[Row]:
    """Our rows of desktop.py."""
    path, work = headers.of(PLAIN, FULL_SHAPE.layers, FULL_SHAPE.vocab), Work(**result["work"])
    for row in result["rows"]:
        if "forecast" not in row:
            continue
        planned = planned_again(path, result, row | {"budget": row["vram_bytes"]}, work)
        known = replace(planned.known, rates=rates_of(row))
        run = {name: figure["tok_s"] for name, figure in row["figures"].items()}
        bus = sum(row["bus_bytes_per_s"]) / len(row["bus_bytes_per_s"]) / 1e9
        yield {
            "what": f"{PLAIN.name}, {row['cores']} cores, {bus:.1f} GB/s, {row['experts_gib']:g} GiB",
            "experts_share": planned.plan.resident_bytes / planned.sizes.all_expert_bytes,
            "measured_share": row["experts_share"],
            "figures": compared(expected(planned, known, work), run),
        }


def of_cpus(result: Row, headers: Headers) -> Iterator[Row]:
    """Rows of cpu_forecast.py."""
    files = cpu_forecast.Files(headers.folder, is_for_plans=True)
    for row in result["rows"]:
        config = cpu_forecast.config_of(files.of(row["model"]), result["cpu_work"], row["threads"])
        rates = rates_of(row)
        with GGUFFile.open(Path(config.model)) as file:
            spec, machine = read_spec(file.metadata, file.tensors), machine_with(rates, result["machine"])
            planned = plan_model(config, Sources(file, spec, machine, bundled_profile(file, spec)))
        plan = cpu_forecast.expected(
            planned.known.model, rates, result["cpu_work"], planned.plan.fixed.chunk_size
        )
        run = {name: both["measured_tok_s"] for name, both in row["figures"].items()}
        yield {
            "what": f"{row['model']}, {row['threads']} threads",
            "experts_share": 1.0,
            "measured_share": 1.0,
            "figures": compared(plan, run),
        }


def conditions_of(result: Row) -> Row:
    """The bus of a result's machine, as text, and whether its kernels' shares were measured."""
    if "cpu_work" in result:
        return {"bus": "–", "has_steps": True}
    if "hardware" in result:
        gpu = result["hardware"]["gpu"]
        return {"bus": f"{gpu['link_bytes_per_s'] / 1e9:.0f}", "has_steps": bool(gpu.get("steps"))}
    rows = [row for mix in result.get("mixes", {}).values() for row in mix["rows"]] or result["rows"]
    rates = [row["rates"] for row in rows if "rates" in row]
    links = sorted(each["link_bytes_per_s"] / 1e9 for each in rates)
    bus = f"{links[0]:.0f}" if round(links[0]) == round(links[-1]) else f"{links[0]:.0f}–{links[-1]:.0f}"
    has_steps = all("shares" in each and not each["shares"]["estimated"] for each in rates)
    return {"bus": bus, "has_steps": has_steps}


def resident_with(sizes: ModelSizes, gib: float | None) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """bool [layers, experts]: those of so many GiB; None: all."""
    fixed = FixedPart(1, KV_TYPE, 1, 0, 0, 0)
    budget = sizes.all_expert_bytes if gib is None else int(gib * GIB)
    plan = plan_placement(sizes, fixed, budget, options=PlanOptions(has_ring=False))
    found = np.zeros((sizes.num_layers, sizes.num_experts), np.bool_)
    found.ravel()[plan.resident_numbers()] = True
    return found


def again(result: Row, headers: Headers) -> list[Row]:
    """Present forecasts beside the runs of a result of any of the four programs. older_than: of a figure, see
    there.

    Raises ValueError for another result.
    """
    rows = _of_any(result, headers)
    for row in rows:
        is_resident = row["measured_share"] == 1.0 or "gpu" not in result["machine"]
        for name, both in row["figures"].items():
            both["older_than"] = None if is_resident else older_than(name, result)
    return rows


def _of_any(result: Row, headers: Headers) -> list[Row]:
    if "mixes" in result:
        return list(of_mixes(result, headers))
    rows = result.get("rows", [{}])
    if "cpu_work" in result:
        return list(of_cpus(result, headers))
    if "work" in result and "forecast" in rows[0]:
        return list(of_desktop(result, headers))
    if "hardware" in result and "chunk_size" in result and "tokens" in rows[0]:
        return list(of_prompts(result, headers))
    if "hardware" in result and "experts_share" in rows[0]:
        return list(of_decoding(result, headers))
    raise ValueError(
        "no result of plan_forecast, gpu_hybrid, gpu_streaming or desktop with the rates of its machine"
    )


def name_of(path: Path) -> str:
    """Of a result in the tables: its path there, if it is one that this repository keeps."""
    kept = ROOT / "docs" / "results" / "gpu"
    return str(path.resolve().relative_to(kept)) if path.resolve().is_relative_to(kept) else path.name


def lines(name: str, measured: Row, rows: list[Row]) -> Iterator[str]:
    """For people: forecast over measured."""
    yield f"{name}, measured at {measured['commit']}, {measured['machine']['cores']} cores"
    for row in rows:
        figures = (
            f"{figure} {both['ratio']:.2f}{' (of an older program)' if both['older_than'] else ''}"
            for figure, both in row["figures"].items()
        )
        yield f"  {row['what']} ({row['experts_share']:.0%} of experts): {', '.join(figures)}"


def arguments(description: str | None = __doc__) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="JSON files")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for headers, which stay there")
    add_result_options(parser)
    return parser


def main() -> int:
    """Exits with 1 if a forecast is not near what the present program reached."""
    options = arguments().parse_args()
    found = []
    with ExitStack() as stack:
        headers = Headers(options.keep or Path(stack.enter_context(TemporaryDirectory())))
        headers.folder.mkdir(parents=True, exist_ok=True)
        for path in options.results:
            result = json.loads(path.read_text())
            measured = {name: result[name] for name in ("commit", "date", "command", "machine")}
            rows = again(result, headers)
            name = name_of(path)
            found.append({"result": name, "measured": measured, **conditions_of(result), "rows": rows})
            print(*lines(name, measured, rows), sep="\n", file=sys.stderr, flush=True)
    write_result({"forecasts": found}, options.out, options.commit)
    figures = [both for each in found for row in each["rows"] for both in row["figures"].values()]
    return int(not all(both["is_near"] or both["older_than"] for both in figures))


if __name__ == "__main__":
    sys.exit(main())
