"""Reads a kernel's attributes from a cubin (ELF with a table of attributes), without NVIDIA's tools."""

import struct

from coldstream.kernels.cuda.compiler import MachineCode

FRAME_SIZE = 0x11  # attribute of `.nv.info`: a symbol's index, then bytes of local memory
WITH_VALUE = 0x04  # attributes of this format are followed by a size and so many bytes; others by two bytes


def stack_bytes(code: MachineCode) -> int:
    """Local memory of a thread of the kernel: arrays that are not in registers, and registers set aside."""
    sections = _sections(code.cubin)
    symbols = _symbol_names(code.cubin, sections)
    ((offset, size, _),) = [place for name, place in sections if name == ".nv.info"]
    end, frames = offset + size, {}
    while offset < end:
        format_, attribute, length = struct.unpack_from("<BBH", code.cubin, offset)
        if format_ == WITH_VALUE:
            if attribute == FRAME_SIZE:
                symbol, frame = struct.unpack_from("<II", code.cubin, offset + 4)
                frames[symbols[symbol]] = frame
            offset += length
        offset += 4
    return int(frames[code.symbol])


def code_bytes(code: MachineCode) -> int:
    """Instructions of the kernel."""
    return int(dict(_sections(code.cubin))[f".text.{code.symbol}"][1])


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
