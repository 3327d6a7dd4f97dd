"""How a server may be reached, before anything listens."""

from pathlib import Path
from typing import Any

import pytest

from coldstream.errors import ConfigError
from coldstream.server.http import ServerSettings, check_exposure, read_api_keys
from coldstream.server.http import settings as http_settings


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "LOCALHOST", "::1", "[::1]"])
def test_loopback_needs_no_key(host: str) -> None:
    check_exposure(ServerSettings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "localhost.example", "127.0.0.1.example"])
def test_au05_other_addresses_without_a_key_are_refused_unless_allowed(host: str) -> None:
    with pytest.raises(ConfigError, match="no key protects it: give --api-key"):
        check_exposure(ServerSettings(host=host))
    check_exposure(ServerSettings(host=host, api_keys=("secret",)))
    check_exposure(ServerSettings(host=host, allow_unprotected=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": -1}, "port must be a number from 0 to 65535, not -1"),
        ({"port": True}, "port must be"),
        ({"host": ""}, "host must be"),
        ({"max_body_bytes": 0}, "max_body_bytes must be"),
        ({"keep_alive_s": float("nan")}, "keep_alive_s must be"),
        ({"slow_headers_s": 0}, "slow_headers_s must be"),
        ({"slow_body_s": -1}, "slow_body_s must be"),
        ({"request_timeout_s": 0}, "request_timeout_s must be"),
        ({"api_keys": ("",)}, "api key: 0 characters"),
        ({"api_keys": ("a b",)}, "api key: 3 characters"),
        ({"api_keys": ("é",)}, "api key: 1 characters"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**settings)


def test_keys_do_not_show_in_the_settings() -> None:
    assert "secret" not in repr(ServerSettings(api_keys=("secret",)))


def test_keys_are_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst\n\n  second  \n")
    assert read_api_keys(path) == ("first", "second")


def test_a_file_of_keys_may_be_as_long_as_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_settings, "_MAX_KEY_FILE_BYTES", 7)
    path = tmp_path / "keys"
    path.write_text("secret\n")
    assert read_api_keys(path) == ("secret",)
    path.write_text("secrets\n")
    with pytest.raises(ConfigError, match="more than 7 bytes: is it a key file"):
        read_api_keys(path)


@pytest.mark.parametrize("content", ["", "# none\n", "two words\n", "\x00\n"])
def test_a_file_without_a_usable_key_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError):
        read_api_keys(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_api_keys(tmp_path / "absent")
