"""Reads a kernel's attributes from a cubin (ELF with tables of attributes), without NVIDIA's tools."""

import struct
from collections.abc import Iterator

from coldstream.kernels.cuda.compiler import MachineCode

# Attributes of `.nv.info`, whose values are a symbol's index and a number; those of a kernel's own section
# have numbers alone.
FRAME_SIZE, REGISTERS, MAX_THREADS = 0x11, 0x2F, 0x05
SYSTEM_BYTES, RESERVED = 1024, ".nv.shared.reserved.0"
WITH_VALUE = 0x04  # attributes of this format are followed by a size and so many bytes; others by two bytes


def stack_bytes(code: MachineCode) -> int:
    """Local memory of a thread of the kernel: arrays that are not in registers, and registers set aside."""
    return _of_symbol(code, FRAME_SIZE)


def registers(code: MachineCode) -> int:
    """Registers of a thread of the kernel."""
    return _of_symbol(code, REGISTERS)


def most_threads(code: MachineCode) -> int:
    """Threads of a block, as the kernel's launch bounds have it; 1024 without such."""
    sections = dict(_sections(code.cubin))
    for attribute, value in _attributes(code.cubin, sections[f".nv.info.{code.symbol}"]):
        if attribute == MAX_THREADS:
            return int(struct.unpack_from("<I", value)[0])
    return 1024


def static_shared_bytes(code: MachineCode) -> int:
    """Shared memory that the kernel declares itself."""
    sizes = {section: size for section, (_, size, _) in _sections(code.cubin)}
    size = sizes.get(f".nv.shared.{code.symbol}", 0)
    # From sm_90 on the compiler lays it out behind what the system takes.
    return max(0, size - SYSTEM_BYTES) if RESERVED in sizes else size


def code_bytes(code: MachineCode) -> int:
    """Instructions of the kernel."""
    return len(instructions(code))


def instructions(code: MachineCode) -> bytes:
    """The kernel's machine code."""
    offset, size, _ = dict(_sections(code.cubin))[f".text.{code.symbol}"]
    return code.cubin[offset : offset + size]


def _of_symbol(code: MachineCode, wanted: int) -> int:
    sections = _sections(code.cubin)
    symbols = _symbol_names(code.cubin, sections)
    found = {
        symbols[symbol]: number
        for attribute, value in _attributes(code.cubin, dict(sections)[".nv.info"])
        if attribute == wanted
        for symbol, number in [struct.unpack("<II", value)]
    }
    return int(found[code.symbol])


def _attributes(cubin: bytes, place: tuple[int, int, int]) -> Iterator[tuple[int, bytes]]:
    """The attributes of a section that have values."""
    offset, size, _ = place
    end = offset + size
    while offset < end:
        format_, attribute, length = struct.unpack_from("<BBH", cubin, offset)
        if format_ == WITH_VALUE:
            yield attribute, cubin[offset + 4 : offset + 4 + length]
            offset += length
        offset += 4


def _sections(cubin: bytes) -> list[tuple[str, tuple[int, int, int]]]:
    """Name, and (offset, bytes, linked section), of each."""
    assert cubin[:5] == b"\x7fELF\x02"
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQI", cubin, table + i * entry_bytes) for i in range(count)]
    return [(_text(cubin, headers[names][4] + header[0]), header[4:7]) for header in headers]


def _symbol_names(cubin: bytes, sections: list[tuple[str, tuple[int, int, int]]]) -> list[str]:
    ((offset, size, strings),) = [place for name, place in sections if name == ".symtab"]
    text = sections[strings][1][0]
    starts = [struct.unpack_from("<I", cubin, at)[0] for at in range(offset, offset + size, 24)]
    return [_text(cubin, text + start) for start in starts]


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()
