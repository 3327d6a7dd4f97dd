"""Facts of a machine without a fault, for tests that change one of them at a time."""

from coldstream.kernels.cuda.driver import Driver, DriverDevice
from coldstream.placement.limits import Limits
from coldstream.planning.diagnosis.machine_facts import (
    Card,
    Cpu,
    Folder,
    Gpu,
    Library,
    MachineFacts,
    MeasuredRates,
    Program,
    Ram,
    Rates,
)

GIB = 2**30
DEVICE = DriverDevice("Example GPU", (8, 9), 8 * GIB)
CARD = Card("0000:01:00.0", 16, 16)
NO_GPU = Gpu((), Driver(), None, ("cuda-bindings",), None, is_restricted=False)
SOUND = MachineFacts(
    program=Program("0.1.0", "3.12.3", "Linux 6.8.0 x86_64", ("0.1.0",), ("~/.venv/bin/coldstream",)),
    cpu=Cpu("Example CPU", ("generic", "avx2"), 8, 16),
    ram=Ram(64 * GIB, 60 * GIB),
    gpu=Gpu((CARD,), Driver((13, 1), 0, (DEVICE,)), "590.1", (), (13, 0), is_restricted=False),
    libraries=(
        Library("numpy", None, "2.4.1", "2.4.1"),
        Library("fastapi", None, "0.200", "0.165"),
        Library("cuda-bindings", "cuda", "13.1.0", "13.0.3"),
    ),
    limits=Limits(
        locked_bytes=None,
        address_space_bytes=None,
        open_files=1024,
        threads_left=30_000,
        machine_ram_bytes=64 * GIB,
        cgroup_memory_bytes=None,
        cgroup_cpus=None,
        num_online_cpus=16,
        huge_pages="madvise",
        wsl=None,
        in_container=False,
    ),
    folders=(
        Folder("rates", "~/.cache/coldstream", True, True, 100 * GIB),
        Folder("kernels", "~/.cache/coldstream/cuda", True, True, 100 * GIB),
        Folder("counts", "~/.cache/coldstream/counts", True, True, 100 * GIB),
        Folder("drafters", "~/.cache/coldstream/drafters", False, True, 100 * GIB),
        Folder("models", "/data/hub", True, True, 100 * GIB),
    ),
    rates=Rates("current", (MeasuredRates("cpu", "2026-01-02 03:04 UTC", 7),)),
)
