"""Every kernel compiled for an architecture: its registers, what it sets aside, and whether a block fits.

    python -m bench.kernels.architectures --arch sm_75 --out docs/results/architectures.json

Needs NVRTC and no GPU. The file keeps what it has of other architectures. `problems` is what the tests ask of
each kernel.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.kernels.every_kernel import DEVICES, ListedKernel, every_kernel
from bench.kernels.machine_code import most_threads, registers, stack_bytes, static_shared_bytes
from bench.results import commit, write_result
from coldstream.kernels.cuda.compiler import MachineCode, compile_uncached
from coldstream.kernels.cuda.device import nvrtc_version
from coldstream.kernels.cuda.limits import DeviceLimits

TOGETHER = 12  # instances in a program of the compiler, which reads their source once
REGISTERS = 65536  # of a multiprocessor
REGISTER_UNIT = 8


def batches(kernels: Sequence[ListedKernel]) -> Iterator[tuple[ListedKernel, ...]]:
    """The kernels of a source, some at a time."""
    for _, those in groupby(kernels, key=lambda each: each.source):
        listed = tuple(those)
        yield from (listed[at : at + TOGETHER] for at in range(0, len(listed), TOGETHER))


def compiled(those: Sequence[ListedKernel], arch: str) -> Iterator[tuple[ListedKernel, MachineCode]]:
    """Kernels of one source with their machine code. Raises CompileError."""
    codes = compile_uncached(those[0].source, [each.instance for each in those], arch)
    return zip(those, codes, strict=True)


def problems(kernel: ListedKernel, code: MachineCode, device: DeviceLimits) -> list[str]:
    """Why a block of the kernel cannot run on the device."""
    found = []
    shared_bytes = kernel.dynamic_bytes + static_shared_bytes(code)
    if shared_bytes > device.shared_per_block:
        found.append(
            f"{kernel.name}: {shared_bytes} bytes of shared memory, {device.shared_per_block} are there"
        )
    own = -(-registers(code) // REGISTER_UNIT) * REGISTER_UNIT * most_threads(code)
    if own > REGISTERS:
        found.append(f"{kernel.name}: a block has {own} registers, and a multiprocessor {REGISTERS}")
    return found


def measure(arch: str) -> dict[str, Any]:
    """One architecture: numbers, and the kernels that set registers aside or have arrays in local memory."""
    device, kernels, begin = DEVICES[arch], every_kernel(arch), time.process_time()
    most_registers, stacks, shared, wrong = 0, {}, 0, []
    for those in batches(kernels):
        for kernel, code in compiled(those, arch):
            most_registers = max(most_registers, registers(code))
            shared = max(shared, kernel.dynamic_bytes + static_shared_bytes(code))
            wrong += problems(kernel, code, device)
            if size := stack_bytes(code):
                stacks[kernel.name] = size
        print(f"{arch}: {those[0].source.name}, {time.process_time() - begin:.0f} s", flush=True)
    return {
        "commit": commit(),
        "kernels": len(kernels),
        "sources": len({each.source for each in kernels}),
        "cpu_s": round(time.process_time() - begin),
        "most_registers": most_registers,
        "most_shared_bytes": shared,
        "stacks": dict(sorted(stacks.items(), key=lambda each: (-each[1], each[0]))),
        "problems": wrong,
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", action="append", choices=[*DEVICES], help="may be given again; all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    is_kept = options.out is not None and options.out.exists()
    kept = json.loads(options.out.read_text())["architectures"] if is_kept else {}
    kept |= {arch: measure(arch) for arch in options.arch or DEVICES}
    major, minor = nvrtc_version() or (0, 0)
    result = {
        "command": "python -m bench.kernels.architectures",
        "nvrtc": f"{major}.{minor}",
        "architectures": {arch: kept[arch] for arch in DEVICES if arch in kept},
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
