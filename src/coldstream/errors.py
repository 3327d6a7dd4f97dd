"""Every error that reaches a person, and the exit code of the command line for each.

Messages name the thing, the limit and the next step, in at most 400 characters with control characters
escaped.

    ColdstreamError                      1
    ├── ModelFormatError                65   a damaged file; message: file, field, offset
    │   ├── TruncatedError                   the file ends before what it declares
    │   ├── OverflowedError                  a count or size that does not fit 63 bits
    │   ├── LimitError                       larger than anything sensible
    │   ├── DuplicateError                   a key or tensor named twice
    │   ├── InconsistentError                two statements of the file contradict each other
    │   └── UnsupportedError                 well-formed, but not something this version runs
    ├── ModelNotFoundError              66   no such path, hub name or file in it
    ├── DownloadError                   69   the hub could not be reached or refused
    ├── GenerationFault                 70   computing failed (NaN logits, a dead worker)
    ├── OutOfMemoryError                71   what does not fit; message: need, free, advice
    ├── DeviceError                     72   no GPU, one that is not supported, or one that failed
    ├── StorageError                    73   a file that could not be written; message: file, reason, advice
    ├── ModelChangedError               74   the model file shrank or changed while in use
    ├── QueueFullError                  75   too many requests wait already; message: how many
    ├── DeadlineError                   75   a request that was not finished by its deadline
    ├── ConfigError                      2   an unknown or contradictory setting
    └── InvalidRequestError              2   a prompt, message list or sampling setting that cannot be served
        ├── ContextFullError                 a prompt with more tokens than the context has room for
        └── TemplateError                    the chat template is absent, failed, or refused
            └── TemplateLimitError           its process was stopped at a limit, died or did not start
"""

import errno
import functools
import reprlib
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

MAX_MESSAGE_CHARS = 400

_P = ParamSpec("_P")
_T = TypeVar("_T")


def escape_controls(text: str) -> str:
    """`text` with non-printable characters escaped, so that a hostile file cannot drive a terminal."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: object) -> str:
    """A caller's value as messages show it: short, and never an error of its own."""
    try:
        return _SHORT.repr(value)
    except Exception:  # such as the text of an integer of ten thousand digits
        return f"a value of type {type(value).__name__}"


class ColdstreamError(Exception):
    """Root of the tree. `exit_code` is what the command line returns."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        message = escape_controls(message)
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 1] + "…"
        super().__init__(message)


class ModelFormatError(ColdstreamError):
    """A model file that is damaged or cannot be run."""

    exit_code = 65


class TruncatedError(ModelFormatError):
    """The file ends before what it declares."""


class OverflowedError(ModelFormatError):
    """A count, size or product does not fit 63 bits."""


class LimitError(ModelFormatError):
    """A value beyond anything sensible; nothing was allocated for it."""


class DuplicateError(ModelFormatError):
    """A key or tensor is named twice."""


class InconsistentError(ModelFormatError):
    """Two statements of the file contradict each other."""


class UnsupportedError(ModelFormatError):
    """Well-formed, but not something this version runs."""


class ModelNotFoundError(ColdstreamError):
    """No such path, hub name, or file within it."""

    exit_code = 66


class DownloadError(ColdstreamError):
    """The hub could not be reached or refused."""

    exit_code = 69


class GenerationFault(ColdstreamError):
    """Computing failed: logits that are not finite, a worker that died."""

    exit_code = 70


class NotFiniteError(GenerationFault):
    """Logits of the model are not finite: its weights, or the state that a sequence has, are damaged."""


class OutOfMemoryError(ColdstreamError):
    """Something that does not fit; the message gives need, free and advice."""

    exit_code = 71


class DeviceError(ColdstreamError):
    """No GPU, one that this version does not support, or one that failed in use."""

    exit_code = 72


class StorageError(ColdstreamError):
    """A file that could not be written: no space, no permission; what was there before still is."""

    exit_code = 73


class ModelChangedError(ColdstreamError):
    """The model file shrank or changed while in use."""

    exit_code = 74


class QueueFullError(ColdstreamError):
    """Too many requests wait already; nothing of the refused one was computed."""

    exit_code = 75


class DeadlineError(ColdstreamError):
    """A request was not finished by its deadline."""

    exit_code = 75


class ConfigError(ColdstreamError):
    """An unknown or contradictory setting."""

    exit_code = 2  # that of every wrong value, whichever part of the program refuses it


class InvalidRequestError(ColdstreamError):
    """A prompt, message list or sampling setting that cannot be served."""

    exit_code = 2


class ContextFullError(InvalidRequestError):
    """A prompt with more tokens than the context has room for.

    num_tokens: of the prompt, or as many as it has at least; None: not known here, as behind another process.
    """

    def __init__(self, message: str, num_tokens: int | None = None, *, is_exact: bool = True) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.is_exact = is_exact


class TemplateError(InvalidRequestError):
    """The chat template is absent, failed, or refused the messages."""


class TemplateLimitError(TemplateError):
    """The process of the chat template was stopped at a limit, died or did not start."""


class host_memory_errors:
    """Raises OutOfMemoryError for what Python and the system raise when the machine has no memory left, or
    this user no thread, process or descriptor.

    A context, or a decorator of functions. Not `contextlib`'s, as decoding a token enters it.
    """

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def translated(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise

        return translated

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (exhausted := out_of_resources(error)):
            raise exhausted from error


def out_of_resources(error: BaseException) -> OutOfMemoryError | None:
    """The error for an exception after which the machine, or this user, has nothing left; None for others."""
    if isinstance(error, MemoryError):
        return _host_out_of_memory(str(error))
    number = None
    if isinstance(error, OSError):
        number = error.errno
        if number == errno.ENOMEM:
            return _host_out_of_memory(str(error.strerror))
    if number in (errno.EMFILE, errno.ENFILE):
        return OutOfMemoryError(
            "no further file can be opened: raise the limit (ulimit -n), or close other programs"
        )
    is_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    if number == errno.EAGAIN or is_thread:
        return OutOfMemoryError(
            "no further thread or process can be started: raise the limit (ulimit -u or -v, or that of the "
            "container on pids), or choose fewer --threads"
        )
    return None


def _host_out_of_memory(what: str) -> OutOfMemoryError:
    reason = f": {what}" if what else ""
    return OutOfMemoryError(
        f"this machine's memory ran out{reason}; close other programs, or choose a smaller --ram or "
        "--ctx-size"
    )
