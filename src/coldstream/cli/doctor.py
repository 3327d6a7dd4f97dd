"""`coldstream doctor`: the machine, the installation, and what would make it run, or run faster."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from coldstream.cli.options import common_options
from coldstream.cli.tables import print_pairs, width_of, wrap
from coldstream.cli.terminal import described_age, format_bytes, visible

if TYPE_CHECKING:
    from coldstream.planning.diagnosis import Finding, MachineFacts
    from coldstream.planning.diagnosis.machine_facts import (
        Folder,
        Gpu,
        Library,
        MeasuredRates,
        Rates,
        RefusedLock,
    )

_WORDS: Final = {"error": "error", "warning": "warning", "advice": "faster"}
_FOLDER_NAMES: Final = {
    "rates": "rates",
    "kernels": "compiled kernels",
    "counts": "memory counts",
    "drafters": "drafters",
    "models": "models",
}


@click.command("doctor", short_help="Check this machine and the installation.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the lists.")
@common_options
def command(as_json: bool) -> int:
    """Show what coldstream finds on this machine, and what keeps it from running or makes it slow.

    Each finding names the command or the file that mends it. Nothing is measured or changed, and no model is
    needed. The output has no keys, no name of a user and no path of a home directory, so it can be
    published.
    """
    # Imported here because they are not needed to show how the verb is used.
    from coldstream import __version__
    from coldstream.planning.diagnosis import exit_code_of, find, gather_facts

    facts = gather_facts(__version__)
    found = find(facts)
    if as_json:
        click.echo(json.dumps(document(facts, found)))
    else:
        print_pairs({name: visible(value) for name, value in summary(facts).items()})
        click.echo()
        for line in finding_lines(found, width_of(sys.stdout)):
            click.echo(line)
    return exit_code_of(found)


def document(facts: "MachineFacts", found: tuple["Finding", ...]) -> dict[str, Any]:
    """What `--json` prints."""
    return {**asdict(facts), "findings": [asdict(finding) for finding in found]}


def finding_lines(found: tuple["Finding", ...], width: int | None) -> list[str]:
    """A line for each finding; on a terminal of `width` cells broken between words."""
    if not found:
        return ["nothing to mend"]
    texts = [f"{_WORDS[each.level]}: {each.text}: {each.mend}" for each in found]
    return [line for text in texts for line in wrap(visible(text), width)]


def summary(facts: "MachineFacts") -> dict[str, str]:
    """What was seen, a line each, by its name."""
    cpu, limits = facts.cpu, facts.limits
    *slower, tier = cpu.tiers
    cores = f"{cpu.num_cores} cores of {cpu.num_logical_cpus} CPUs, {limits.num_online_cpus} in the machine"
    return {
        "coldstream": f"{facts.program.version}, Python {facts.program.python}",
        "system": f"{facts.program.system}{_guest(facts)}",
        "CPU": f"{cpu.name}: {cores}",
        "kernels": tier + (f" (also {', '.join(slower)})" if slower else ""),
        "RAM": f"{format_bytes(facts.ram.total_bytes)}, {format_bytes(facts.ram.available_bytes)} available",
        **_gpu(facts.gpu),
        **_libraries(facts.libraries),
        "locked memory": _size(limits.locked_bytes) + _refused(facts.refused_lock),
        "container memory": _size(limits.cgroup_memory_bytes),
        "container CPUs": _count(limits.cgroup_cpus),
        "address space": _size(limits.address_space_bytes),
        "threads": _count(limits.threads_left) + (" more" if limits.threads_left is not None else ""),
        "open files": _count(limits.open_files),
        "huge pages": limits.huge_pages or "unknown",
        **{_FOLDER_NAMES[folder.name]: _folder(folder) for folder in facts.folders},
        "measured": _rates(facts.rates),
    }


def _guest(facts: "MachineFacts") -> str:
    wsl = f", WSL {facts.limits.wsl}" if facts.limits.wsl else ""
    return wsl + (", in a container" if facts.limits.in_container else "")


def _gpu(gpu: "Gpu") -> dict[str, str]:
    """Cards and driver; without a driver the cards on the bus."""
    driver = gpu.driver
    lines = {
        f"GPU {number}": f"{card.name}, {format_bytes(card.total_bytes)}, compute capability "
        f"{card.capability[0]}.{card.capability[1]}"
        for number, card in enumerate(driver.devices)
    }
    if not lines:
        lines = {"GPU": f"none to use, {len(gpu.cards)} on the bus" if gpu.cards else "none"}
    if driver.cuda_version is None:
        return {**lines, "driver": "none"}
    served = f"CUDA {driver.cuda_version[0]}.{driver.cuda_version[1]}"
    compiler = f"{gpu.nvrtc[0]}.{gpu.nvrtc[1]}" if gpu.nvrtc else "none"
    return {**lines, "driver": f"{gpu.driver_version}, {served}", "NVRTC": compiler}


def _libraries(libraries: tuple["Library", ...]) -> dict[str, str]:
    """Packages with their versions, a line for each extra."""
    extras = dict.fromkeys(each.extra for each in libraries)
    return {
        f"extra {extra}" if extra else "libraries": ", ".join(
            f"{each.name} {each.version or 'missing'}" for each in libraries if each.extra == extra
        )
        for extra in extras
    }


def _folder(folder: "Folder") -> str:
    if folder.path is None:
        return "nowhere"
    access = "writable" if folder.is_writable else "not writable"
    free = "" if folder.free_bytes is None else f", {format_bytes(folder.free_bytes)} free"
    return f"{folder.path}{'' if folder.exists else ', not made yet'}, {access}{free}"


def _rates(rates: "Rates") -> str:
    if not rates.measured:
        return {"absent": "not yet", "incomplete": "the CPU, the GPU not yet"}.get(rates.state, rates.state)
    texts = {each.name.upper(): _when(each) for each in rates.measured}
    if len({*texts.values()}) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name} {text}" for name, text in texts.items())


def _when(measured: "MeasuredRates") -> str:
    when = f"{measured.measured_at}, {described_age(measured.age_days)}"
    return f"{when}, under load" if measured.problems else when


def _refused(last: "RefusedLock | None") -> str:
    if last is None:
        return ""
    sizes = f"{format_bytes(last.locked_bytes)} of {format_bytes(last.wanted_bytes)}"
    return f"; a GPU got {sizes} at {last.refused_at}, {described_age(last.age_days)}"


def _size(limit: int | None) -> str:
    return "no limit" if limit is None else format_bytes(limit)


def _count(limit: float | None) -> str:
    return "no limit" if limit is None else f"{limit:g}"
