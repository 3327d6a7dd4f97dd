"""Sizes as people write them: the one parser of the command line and of Python's settings."""

import re

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([kmgt]?)(?:i?b)?", re.ASCII)


def parse_size(text: str) -> int:
    """A number with an optional binary unit: 8192, 8k, 10G, 1.5GiB. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 4096, 8k or 10G")
    return int(float(match[1]) * _UNITS[match[2]])
