"""The machine with measured rates, which are kept in the user's cache directory.

They are measured once, again on request, and again when a run was far faster than they explain: other
programs may have slowed the first measurement. One that something is known to have disturbed is a starting
point, and is taken again in an idle moment. Where an older file lacks rates of steps, those alone are
measured.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from coldstream.errors import DeviceError, OutOfMemoryError, StorageError
from coldstream.kernels.cuda.device import Gpu, measure_copy_bandwidth
from coldstream.kernels.cuda.driver import driver_version
from coldstream.kernels.experts.cpu_rates import Codes, written_codes
from coldstream.kernels.experts.step_rates import StepRates
from coldstream.kernels.linear.cpu_rates import RowProduct, measure_product_rates
from coldstream.kernels.mixer_rates import MixerRates, measure_mixer_rates
from coldstream.placement.conditions import LoadWatch, is_idle
from coldstream.placement.hardware import GpuHardware, Hardware, affinity, read_windows
from coldstream.placement.hardware_file import (
    DATE_FORMAT,
    default_path,
    describe_rates,
    fastest_run,
    store_rates,
    with_stored_rates,
)

Progress = Callable[[str, int, int], None]

_FAR: Final = 1.5  # stored rates are too low if something ran this many times faster than they explain
_NUM_HANDSHAKES: Final = 3  # measurements, each the mean of many; the best counts


def hardware_of(gpu: Gpu | None) -> Hardware:
    """This machine, with `gpu` as `find_gpu` gave it, and no rates."""
    return Hardware.measure() if gpu is None else hardware_with(gpu)


def measured_hardware(
    gpu: Gpu | None, progress: Progress | None = None, path: Path | None = None, *, again: bool = False
) -> Hardware:
    """This machine, with `gpu` as `find_gpu` gave it, and its rates. As `with_rates`, and also measured again
    in an idle moment where something disturbed it before.
    """
    hardware = hardware_of(gpu)
    again = again or is_time_to_measure_again(hardware, path)
    return with_rates(hardware, progress, path, again=again)


def rates_are_known(hardware: Hardware, path: Path | None = None) -> bool:
    """Whether all rates of this machine are kept."""
    stored = with_stored_rates(hardware, path or default_path())
    return stored is not None and not _lacks_steps(stored)


def rates_are_due(hardware: Hardware, path: Path | None = None) -> bool:
    """Whether something disturbed the measurement of the kept rates, which is to be taken again then."""
    stored = with_stored_rates(hardware, path or default_path())
    return stored is not None and stored.is_disturbed


def is_time_to_measure_again(hardware: Hardware, path: Path | None = None) -> bool:
    """Whether something disturbed the measurement of the kept rates, and nothing would now.

    Takes a third of a second if something did.
    """
    return rates_are_due(hardware, path) and is_idle(affinity())


def measure_again(hardware: Hardware, path: Path | None = None) -> bool:
    """Measures what something disturbed, unless others are busy. Returns whether that is still to be done.

    For a moment in which nobody waits. Raises DeviceError, OutOfMemoryError.
    """
    if is_time_to_measure_again(hardware, path):
        with_rates(hardware, path=path, again=True)
    return rates_are_due(hardware, path)


def why_unusable(hardware: Hardware, path: Path | None = None) -> tuple[str, ...]:
    """Why a file of rates is of no use, in a sentence; none if there is no file, or it is of use."""
    path = path or default_path()
    found = describe_rates(hardware, path)
    if found.state in ("current", "absent", "incomplete", "of another version"):  # after an upgrade
        return ()
    if found.state == "no file":
        return (f"{path} is no file, so no rates of this machine are kept: remove it",)
    why = f" ({found.absurd})" if found.absurd else ""
    return (f"the kept rates in {path} are {found.state}{why}: a plan that needs rates measures them again",)


def why_not_kept(hardware: Hardware, path: Path | None = None) -> tuple[str, ...]:
    """Why rates that were measured now are not in the file, in a sentence; none if they are, or if
    `why_unusable` says it.
    """
    path = path or default_path()
    if describe_rates(hardware, path).state in ("current", "no file"):
        return ()
    where = "this user has no home directory" if path is None else f"rates could not be kept in {path}"
    return (f"{where}, so each plan measures this machine again: `coldstream doctor` shows the folder",)


@contextmanager
def compiling_for_rates(hardware: Hardware) -> Iterator[None]:
    """Inside, the kernels that `with_rates` launches on a GPU are compiled beside the caller."""
    if hardware.gpu is None:
        yield
        return
    from coldstream.kernels.cuda.kernel_loading import KernelLoading
    from coldstream.kernels.cuda.link import PRODUCTS
    from coldstream.kernels.experts.gpu_rates import needed_kernels

    loading = KernelLoading([*((PRODUCTS, instance) for instance in PRODUCTS.instances), *needed_kernels()])
    try:
        yield
    finally:
        loading.close()


def with_rates(
    hardware: Hardware, progress: Progress | None = None, path: Path | None = None, *, again: bool = False
) -> Hardware:
    """`hardware`, which is this machine, with its rates.

    The rates are read from the file at `path` (None: the default one), or measured in a few seconds and
    stored there if possible; again: measured in any case. Where something disturbs that, a rate that was
    better before stays. Raises DeviceError, OutOfMemoryError.
    """
    path = path or default_path()
    stored = with_stored_rates(hardware, path)
    if stored is not None and not again:
        return _completed(stored, path) if _lacks_steps(stored) else stored
    hardware = _following(measure_rates(hardware, progress), stored)
    with suppress(StorageError):  # the next call measures again
        store_rates(hardware, path)
    return hardware


def _lacks_steps(hardware: Hardware) -> bool:
    return hardware.gpu is not None and hardware.gpu.steps is None


def _completed(stored: Hardware, path: Path | None) -> Hardware:
    """With rates of steps, which are kept, with what disturbed them. Without, if they cannot be had."""
    watch, gpu = LoadWatch(affinity()), stored.gpu
    assert gpu is not None
    with suppress(DeviceError, OutOfMemoryError):
        gpu = replace(gpu, steps=_measured_steps(stored, _written(stored)))
    if gpu.steps is None:
        return stored
    conditions = watch.conditions()
    if conditions.problems:
        gpu = replace(gpu, conditions=conditions)
    stored = replace(stored, gpu=gpu)
    with suppress(StorageError):
        store_rates(stored, path, fastest_run(stored, path))
    return stored


def _written(hardware: Hardware) -> Codes:
    """Memory that measurements of `hardware` read one after the other."""
    return written_codes(hardware.num_physical_cores, hardware.measured_bytes)


def _measured_steps(hardware: Hardware, codes: Codes) -> StepRates | None:
    """None for figures that no machine has. Raises DeviceError, OutOfMemoryError."""
    from coldstream.kernels.experts.gpu_rates import measure_step_rates

    steps = measure_step_rates(hardware.num_physical_cores, codes)
    return steps if steps.is_sane else None


class LateRates:
    """Rates of this machine as they are kept; what was never measured is assumed, and measured in the end.

    So is what something disturbed. For a plan that should not wait for a measurement, which takes seconds.
    """

    def __init__(self, hardware: Hardware, path: Path | None = None) -> None:
        """hardware: this machine. path: of the file of rates; None: the default one."""
        self._hardware, self._path = hardware, path
        self.are_assumed = False  # by a plan, since it asked for them
        self._is_disturbed = self._lacks_steps = False

    def find(self) -> Hardware:
        """The machine with its rates, or without any. `placement/rates.py` assumes those then."""
        stored = with_stored_rates(self._hardware, self._path or default_path())
        self.are_assumed = stored is None
        self._is_disturbed = stored is not None and stored.is_disturbed
        self._lacks_steps = stored is not None and _lacks_steps(stored)
        return stored or self._hardware

    def measure(self, progress: Progress | None = None) -> None:
        """Measures and keeps what a plan assumed, for later ones. Nothing else should run meanwhile.

        What cannot be measured or kept stays unknown. What was disturbed is left alone while others are busy.
        """
        is_due = self._is_disturbed and is_idle(affinity())
        if self.are_assumed or self._lacks_steps or is_due:
            with suppress(DeviceError, OutOfMemoryError):
                with_rates(self._hardware, progress, self._path, again=is_due)
                self.are_assumed = self._lacks_steps = False
                self._is_disturbed = self._is_disturbed and not is_due


def reconsider_rates(
    hardware: Hardware, times_as_fast: Callable[[Hardware], float], path: Path | None = None
) -> bool:
    """Measures this machine again if a run was far faster than its stored rates explain.

    hardware: as the run found it, on which device it says; times_as_fast: the run's speed as a multiple of
    what given rates explain. Stores the better of old and new rates. Only once for runs of this speed, as
    small models fit into caches, which are faster than memory, and a forecast may be wrong by itself. Returns
    whether it measured; what cannot be measured or stored stays as it is.
    """
    path = path or default_path()
    stored = with_stored_rates(hardware, path)
    if stored is None or times_as_fast(stored) <= _FAR * max(1.0, fastest_run(hardware, path)):
        return False
    with suppress(DeviceError, OutOfMemoryError, StorageError):
        better = _better(measure_rates(hardware), stored)
        store_rates(better, path, times_as_fast(better))
        return True
    return False


def _better(one: Hardware, other: Hardware) -> Hardware:
    """`one` with the better rates of both measurements, in `other` of the same machine."""
    gpu = one.gpu
    if one.gpu and other.gpu:
        both = (one.gpu, other.gpu)
        beside = max(both, key=lambda each: (each.link_beside_read or 0) + (each.read_beside_link or 0))
        gpu = replace(
            beside,  # the link and the threads, measured at the same time
            copy_bytes_per_s=_highest(each.copy_bytes_per_s for each in both),
            product_ops_per_s=_highest(each.product_ops_per_s for each in both),
            link_bytes_per_s=_highest(each.link_bytes_per_s for each in both),
            handshake_s=min((each.handshake_s for each in both if each.handshake_s), default=None),
            expert_bytes_per_s=_highest_each(each.expert_bytes_per_s for each in both),
            steps=_better_steps(one.gpu.steps, other.gpu.steps),
        )
    by_type = zip(one.product_values_per_s or (), other.product_values_per_s or (), strict=True)
    return replace(
        one,
        gpu=gpu,
        read_bytes_per_s=_highest((one.read_bytes_per_s, other.read_bytes_per_s)),
        product_values_per_s=tuple(tuple(map(max, *rates)) for rates in by_type),
        row_bytes_per_s=_highest((one.row_bytes_per_s, other.row_bytes_per_s)),
        mixers=_better_mixers(one.mixers, other.mixers),
    )


def _following(measured: Hardware, stored: Hardware | None) -> Hardware:
    """What to keep of a measurement, and of what was kept before it of the same machine.

    A measurement that nothing disturbed replaces all. Otherwise no rate falls, as what is disturbed is slower
    than the machine is.
    """
    if stored is None or not measured.is_disturbed:
        return measured
    better = _better(measured, stored)
    before = (stored.conditions, stored.gpu.conditions if stored.gpu else None)
    tries = 1 + max(each.num_tries if each and each.problems else 0 for each in before)
    conditions = measured.conditions and replace(measured.conditions, num_tries=tries)
    gpu = better.gpu and replace(better.gpu, conditions=conditions)
    return replace(better, conditions=conditions, gpu=gpu)


def _better_steps(one: StepRates | None, other: StepRates | None) -> StepRates | None:
    return one.better(other) if one and other else one or other


def _better_mixers(one: MixerRates | None, other: MixerRates | None) -> MixerRates | None:
    return one.better(other) if one and other else one or other


def _highest(rates: Iterable[float | None]) -> float | None:
    return max((rate for rate in rates if rate), default=None)


def _highest_each(rates: Iterable[tuple[float, ...] | None]) -> tuple[float, ...] | None:
    known = [each for each in rates if each]
    return tuple(map(max, zip(*known, strict=True))) if known else None


def hardware_with(gpu: Gpu) -> Hardware:
    """This machine, with `gpu` as `find_gpu` gave it, and no rates."""
    facts = GpuHardware(gpu.name, driver_version(), gpu.total_bytes, gpu.free_bytes)
    return replace(Hardware.measure(), gpu=facts)


def measure_rates(hardware: Hardware, progress: Progress | None = None) -> Hardware:
    """`hardware` with all its rates measured now. Raises DeviceError, OutOfMemoryError."""
    threads = hardware.num_physical_cores
    report = progress or (lambda what, done, total: None)
    report("measuring this machine", 0, 6)
    now, watch = datetime.now(UTC).strftime(DATE_FORMAT), LoadWatch(affinity())
    windows: Sequence[float]
    codes = _written(hardware)
    if hardware.gpu is None:
        gpu, windows = None, read_windows(threads, codes)
    else:  # the same readers, beside the bus and without it
        gpu, windows = _measured_gpu(hardware, hardware.gpu, codes, report)
    products, row = measure_product_rates(threads), RowProduct(threads, codes)
    row_rate, mixers = row.bytes_per_s(), measure_mixer_rates(threads, row.run, codes)
    conditions = watch.conditions(windows)
    return replace(
        hardware,
        read_bytes_per_s=max(windows),
        product_values_per_s=products,
        row_bytes_per_s=row_rate,
        mixers=mixers if mixers.is_sane else None,
        gpu=gpu and replace(gpu, measured_at=now, conditions=conditions),
        measured_at=now,
        conditions=conditions,
    )


def _measured_gpu(
    hardware: Hardware, gpu: GpuHardware, codes: Codes, report: Progress
) -> tuple[GpuHardware, Sequence[float]]:
    """The GPU of `hardware` with its rates, and those of the bus and of the CPU beside it; and the rates of
    reading without them.
    """
    from coldstream.kernels.cuda.link import measure_handshake, measure_link, measure_products
    from coldstream.kernels.experts.cpu_rates import measure_expert_rates

    threads = hardware.num_physical_cores
    report("measuring this machine", 1, 6)
    link = measure_link(threads, codes)
    report("measuring this machine", 2, 6)
    handshake_s: float | None = None
    with suppress(DeviceError):  # a driver without such operations; the GPU's work does not depend on them
        handshake_s = min(measure_handshake(threads) for _ in range(_NUM_HANDSHAKES))
    report("measuring this machine", 3, 6)
    expert_rates = measure_expert_rates(threads, codes)
    report("measuring this machine", 4, 6)
    steps: StepRates | None = None
    with suppress(DeviceError, OutOfMemoryError):  # estimates stay in their place
        steps = _measured_steps(hardware, codes)
    report("measuring this machine", 5, 6)
    measured = replace(
        gpu,
        copy_bytes_per_s=measure_copy_bandwidth(),
        product_ops_per_s=measure_products(),
        link_bytes_per_s=link.alone,
        link_beside_read=link.beside_read,
        read_beside_link=link.read_beside,
        handshake_s=handshake_s,
        expert_bytes_per_s=expert_rates,
        steps=steps,
    )
    return measured, link.windows
