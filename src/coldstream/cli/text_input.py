"""Texts from files and from standard input: bounded in size, and UTF-8."""

import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from coldstream.errors import InvalidRequestError

MAX_TEXT_BYTES = 16 * 2**20
STANDARD_INPUT = Path("-")


def prompt_of(prompt: str | None, file: Path | None) -> str | None:
    """The prompt: the text of `file`, or else piped input, followed by `prompt`.

    None if there is neither, and standard input is a terminal. Raises InvalidRequestError as `read_text`, and
    for an empty text.
    """
    if prompt == "":
        raise InvalidRequestError("the prompt is empty: give a text with -p")
    if file is not None:
        before = _prompt(read_piped() if file == STANDARD_INPUT else read_text(file, "-f"))
        if not before:
            raise InvalidRequestError(f"{_name(file)} is empty: give a file with a prompt")
    elif prompt is None:
        if sys.stdin and sys.stdin.isatty():
            return None
        before = _prompt(read_piped())
        if not before:
            raise InvalidRequestError("standard input is empty: pipe a prompt in, or give one with -p")
    else:
        before = _prompt(read_piped()) if _is_pipe_or_file() else ""
    return "\n".join(filter(None, (before, prompt)))


def read_text(path: Path, option: str) -> str:
    """The file's content. Raises InvalidRequestError if it cannot be read, is huge or not UTF-8."""
    try:
        with open(path, "rb") as file:
            return _decoded(file, str(path))
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}; give a text file with {option}") from error


def read_piped() -> str:
    """All of standard input. Raises InvalidRequestError if it is huge or not UTF-8."""
    return _decoded(sys.stdin.buffer, _name(STANDARD_INPUT)) if sys.stdin else ""


def _decoded(file: BinaryIO, name: str) -> str:
    data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise InvalidRequestError(f"{name} has more than {MAX_TEXT_BYTES} bytes; give a part of it")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name} is not UTF-8 text: byte {error.start}") from error


def _prompt(text: str) -> str:
    """`text` without its last line end, which is the file's and not the prompt's."""
    return text.removesuffix("\n")


def _name(path: Path) -> str:
    return "standard input" if path == STANDARD_INPUT else str(path)


def _is_pipe_or_file() -> bool:
    """Whether standard input is certainly meant; what a service or a remote shell leaves open is a socket."""
    if not sys.stdin:
        return False
    mode = os.fstat(sys.stdin.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
