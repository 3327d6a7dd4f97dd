"""The machine with measured rates, which are kept in the user's cache directory.

They are measured once, again on request, and again when a run was far faster than they allow: other programs
may have slowed the first measurement.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from coldstream.errors import DeviceError, StorageError
from coldstream.kernels.cuda.device import Gpu, measure_copy_bandwidth
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.hardware_file import default_path, fastest_run, store_rates, with_stored_rates

Progress = Callable[[str, int, int], None]

_FAR: Final = 1.5  # times as fast as the stored rate, which then must be too low


def measured_hardware(
    gpu: Gpu | None, progress: Progress | None = None, path: Path | None = None, *, again: bool = False
) -> Hardware:
    """This machine, with `gpu` as `find_gpu` gave it, and its rates.

    The rates are read from the file at `path` (None: the default one), or measured in a few seconds and
    stored there if possible; again: measured in any case. Raises DeviceError, OutOfMemoryError.
    """
    path = path or default_path()
    hardware = Hardware.measure() if gpu is None else hardware_with(gpu)
    stored = None if again else with_stored_rates(hardware, path)
    if stored is not None:
        return stored
    hardware = measure_rates(hardware, progress)
    with suppress(StorageError):  # the next call measures again
        store_rates(hardware, path)
    return hardware


def reconsider_rates(run_bytes_per_s: float, path: Path | None = None) -> bool:
    """Measures the CPU's memory again if a run has read weights far faster than the stored rate.

    Stores the higher of both rates. Only once for runs of this speed, as small models fit into caches, which
    are faster than memory. Returns whether it measured.
    """
    path = path or default_path()
    stored = with_stored_rates(Hardware.measure(), path)
    if stored is None or stored.read_bytes_per_s is None:
        return False
    if run_bytes_per_s <= _FAR * max(stored.read_bytes_per_s, fastest_run(stored, path)):
        return False
    again = _dated(stored.with_bandwidth(stored.num_physical_cores))
    assert again.read_bytes_per_s is not None
    better = replace(again, read_bytes_per_s=max(again.read_bytes_per_s, stored.read_bytes_per_s))
    with suppress(StorageError):
        store_rates(better, path, run_bytes_per_s)
    return True


def _dated(hardware: Hardware) -> Hardware:
    return replace(hardware, measured_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))


def hardware_with(gpu: Gpu) -> Hardware:
    """This machine, with `gpu` as `find_gpu` gave it, and no rates."""
    # Imported here because it needs packages that a machine without a GPU does not have.
    from coldstream.kernels.cuda.link import driver_version

    facts = GpuHardware(gpu.name, driver_version(), gpu.total_bytes, gpu.free_bytes)
    return replace(Hardware.measure(), gpu=facts)


def measure_rates(hardware: Hardware, progress: Progress | None = None) -> Hardware:
    """`hardware` with all its rates measured now. Raises DeviceError, OutOfMemoryError."""
    threads = hardware.num_physical_cores
    report = progress or (lambda what, done, total: None)
    report("measuring this machine", 0, 4)
    hardware = _dated(hardware.with_bandwidth(threads))
    if hardware.gpu is None:
        return hardware
    from coldstream.kernels.cuda.link import measure_handshake, measure_link, measure_products

    report("measuring this machine", 1, 4)
    link = measure_link(threads, hardware.reader_bytes)
    report("measuring this machine", 2, 4)
    handshake_s: float | None = None
    with suppress(DeviceError):  # a driver without such operations; the GPU's work does not depend on them
        handshake_s = measure_handshake(threads)
    report("measuring this machine", 3, 4)
    gpu = replace(
        hardware.gpu,
        copy_bytes_per_s=measure_copy_bandwidth(),
        product_ops_per_s=measure_products(),
        link_bytes_per_s=link.alone,
        link_beside_read=link.beside_read,
        read_beside_link=link.read_beside,
        handshake_s=handshake_s,
    )
    return replace(hardware, gpu=gpu)
