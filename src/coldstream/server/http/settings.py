"""How the HTTP server is reached and protected. Pure data; every limit of a request stands here."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from coldstream.errors import ConfigError, InvalidRequestError, shown
from coldstream.gguf.chat_template import check_settings

MAX_KEY_CHARS: Final = 512
_MAX_KEY_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """Checked on creation: ConfigError names the setting and its range."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: no key is asked for
    # Names that a Host header may have besides those of this machine; with any, or a loopback `host`, others
    # are refused, so that no page can reach the server under a name of its own.
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # web pages that may call this server, beside its own
    allow_unprotected: bool = False  # serve beyond loopback without a key
    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 16 << 10  # limit for all headers of a request
    max_headers: int = 100
    max_n: int = 16  # most answers to a prompt
    max_prompts: int = 64  # most prompts of a completion request
    keep_alive_s: float = 10.0  # seconds between comments in a stream without events
    slow_reader_s: float = 60.0  # longest time that a client may leave data unread
    slow_headers_s: float = 10.0  # longest time for a request's headers, from its connection or first byte
    slow_body_s: float = 10.0  # longest time between two parts of a body
    # Of requests that give none themselves, see `chat_template.SETTINGS`.
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    drop_volatile: bool = False  # leave out lines of system prompts that change, see `volatile_lines.py`
    restart_on_change: bool = False  # load a model's file anew that has changed while it was served
    stall_s: float = 60.0  # unhealthy after so long without progress while requests wait
    request_timeout_s: float | None = None  # from arrival to the last token; None: no limit

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_header_bytes", "max_headers", "max_n", "max_prompts"):
            _check_number(name, getattr(self, name), 1, 1 << 40)
        for name in ("keep_alive_s", "slow_reader_s", "slow_headers_s", "slow_body_s", "stall_s"):
            _check_number(name, getattr(self, name), 1e-3, 1e9)
        if self.request_timeout_s is not None:
            _check_number("request_timeout_s", self.request_timeout_s, 1e-3, 1e9)
        _check_number("port", self.port, 0, 65535)
        if not self.host:
            raise ConfigError("host must be an address or a name, such as 127.0.0.1, not empty")
        for key in self.api_keys:
            check_key(key)
        try:
            check_settings(self.chat_template_kwargs)
        except InvalidRequestError as error:
            raise ConfigError(f"chat_template_kwargs (--chat-template-kwargs): {error}") from error

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def checks_host(self) -> bool:
        """Whether requests for other names than those of this machine and `allowed_hosts` are refused."""
        return self.is_loopback or bool(self.allowed_hosts)


def check_exposure(settings: ServerSettings) -> None:
    """Raises ConfigError for a server that others could reach without a key."""
    if settings.is_loopback or settings.api_keys or settings.allow_unprotected:
        return
    raise ConfigError(
        f"host {shown(settings.host)}: other machines could use this server, and no key protects it: give "
        "--api-key or --api-key-file, or listen on 127.0.0.1"
    )


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address with or without brackets, is this machine and never another."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def check_key(key: str) -> None:
    """Raises ConfigError for what cannot stand in a header. The message does not show the key."""
    if not 1 <= len(key) <= MAX_KEY_CHARS or not all("!" <= char <= "~" for char in key):
        raise ConfigError(
            f"api key: {len(key)} characters: 1 to {MAX_KEY_CHARS} of printable ASCII without blanks are "
            "needed"
        )


def read_api_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and those that begin with # do not count.

    Raises ConfigError for a file that cannot be read, holds none, or one that `check_key` refuses.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from error
    if len(data) > _MAX_KEY_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path}: more than {_MAX_KEY_FILE_BYTES} bytes: is it a key file?")
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path}: it holds no key: write one on a line of its own")
    for key in keys:
        check_key(key)
    return keys


def _check_number(name: str, value: float, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, not {shown(value)}")
