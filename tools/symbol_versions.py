"""What the extension in a wheel needs of the system, held against the glibc that the wheel's name promises.

    python -m tools.symbol_versions dist/coldstream-*.whl

The name ends in manylinux_2_28_x86_64, for example: any system with glibc 2.28 or newer must load the
extension. So it may need glibc's own libraries, with symbols of at most that version, and nothing else: no
libstdc++, whose versions differ as well. Needs pyelftools, which auditwheel brings along.
"""

import argparse
import io
import re
import sys
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

TAG = re.compile(r"-manylinux_(\d+)_(\d+)_\w+\.whl$")
GLIBC = re.compile(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?")
LIBRARIES = {
    *("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"),
    *("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"),
}


def problems(wheel: Path) -> list[str]:
    """What its extension needs and the named glibc may lack, a sentence each; none if it loads everywhere."""
    tag = TAG.search(wheel.name)
    if tag is None:
        return [f"{wheel.name} names no version of glibc (manylinux_X_Y)"]
    limit = int(tag[1]), int(tag[2])
    with zipfile.ZipFile(wheel) as files:
        libraries = {name: files.read(name) for name in files.namelist() if name.endswith(".so")}
    if not libraries:
        return [f"{wheel.name} has no extension"]
    return [text for name, data in sorted(libraries.items()) for text in excess(name, data, limit)]


def excess(name: str, data: bytes, limit: tuple[int, int]) -> list[str]:
    """What the shared library `name` needs besides glibc of version `limit`."""
    elf = ELFFile(io.BytesIO(data))
    versions = needed_versions(elf)
    if not versions:
        return [f"{name} names no version of any symbol, so nothing can be said of it"]
    found = [f"{name} needs the library {each}" for each in sorted(needed_libraries(elf) - LIBRARIES)]
    return found + [
        f"{name} needs {version} of {library}, which glibc {limit[0]}.{limit[1]} lacks"
        for library, version in sorted(versions)
        if not is_in_glibc(version, limit)
    ]


def needed_libraries(elf: ELFFile) -> set[str]:
    """Names of the shared libraries that are loaded with it."""
    section = elf.get_section_by_name(".dynamic")
    return {tag.needed for tag in section.iter_tags("DT_NEEDED")} if section else set()


def needed_versions(elf: ELFFile) -> set[tuple[str, str]]:
    """(library, version) of all symbols that it takes from others, such as ("libc.so.6", "GLIBC_2.14")."""
    section = elf.get_section_by_name(".gnu.version_r")
    if section is None:
        return set()
    return {(need.name, each.name) for need, versions in section.iter_versions() for each in versions}


def is_in_glibc(version: str, limit: tuple[int, int]) -> bool:
    """Whether `version` is one of glibc's, and not newer than `limit`."""
    match = GLIBC.fullmatch(version)
    return match is not None and (int(match[1]), int(match[2])) <= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    found = [problem for wheel in parser.parse_args().wheels for problem in problems(wheel)]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
