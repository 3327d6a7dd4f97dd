"""The machine with measured rates: they are measured once and kept in the user's cache directory."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from coldstream.errors import DeviceError, StorageError
from coldstream.kernels.cuda.device import Gpu, measure_copy_bandwidth
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.hardware_file import default_path, store_rates, with_stored_rates

Progress = Callable[[str, int, int], None]


def measured_hardware(
    gpu: Gpu | None, progress: Progress | None = None, path: Path | None = None
) -> Hardware:
    """This machine, with `gpu` as `find_gpu` gave it, and its rates.

    They come from the file at `path` (None: the default one), or are measured in a few seconds and stored
    there if that is possible. Raises DeviceError, OutOfMemoryError.
    """
    path = path or default_path()
    hardware = Hardware.measure() if gpu is None else hardware_with(gpu)
    stored = with_stored_rates(hardware, path)
    if stored is not None:
        return stored
    hardware = measure_rates(hardware, progress)
    with suppress(StorageError):  # then it is measured again the next time
        store_rates(hardware, path)
    return hardware


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
    hardware = hardware.with_bandwidth(threads)
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
