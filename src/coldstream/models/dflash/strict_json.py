"""JSON objects of files that cannot be trusted."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from coldstream.errors import (
    DuplicateError,
    InconsistentError,
    LimitError,
    ModelNotFoundError,
    UnsupportedError,
)
from coldstream.gguf.messages import DAMAGED, shorten


def open_regular(path: Path, advice: str) -> int:
    """A descriptor of a regular file to read.

    Raises ModelNotFoundError, with `advice`, if it cannot be opened, and UnsupportedError if it is something
    else: a pipe, say, which would be waited for.
    """
    try:
        # Before it is opened, because opening alone has effects on some devices.
        if stat.S_ISREG(os.stat(path).st_mode):
            return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise ModelNotFoundError(f"{shorten(path)}: {error.strerror}. {advice}") from error
    raise UnsupportedError(f"{shorten(path)} is not a regular file. {advice}")


def read_object(path: Path, max_bytes: int, advice: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises as `open_regular` and `parse_object`, and LimitError if the file has more than max_bytes.
    """
    with open(open_regular(path, advice), "rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise LimitError(f"{shorten(path)} has more than {max_bytes} bytes: {DAMAGED}")
    return parse_object(text, path)


def parse_object(text: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in `text`; `path` is for messages.

    Raises DuplicateError for a name that appears twice in an object, and InconsistentError for what is not
    JSON, NaN and infinities included, or nested deeper than Python follows.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise DuplicateError(f"{shorten(path)}: {twice:.80} appears twice: {DAMAGED}")
        return values

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is no number")

    try:
        values = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise InconsistentError(f"{shorten(path)} is not valid JSON ({error!s:.80}): {DAMAGED}") from error
    if not isinstance(values, dict):
        raise InconsistentError(f"{shorten(path)} is not a JSON object: {DAMAGED}")
    return values
