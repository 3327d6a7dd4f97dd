"""What a config file of Ray Serve may say, and that nothing needs Ray for it."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coldstream.assets import demo_model_path
from coldstream.errors import ConfigError
from coldstream.ray import build
from coldstream.ray.options import ServiceOptions


def test_nothing_said_is_two_replicas_of_the_bundled_model() -> None:
    options = ServiceOptions.from_args({})
    assert (options.name, options.replicas, options.config.parallel) == ("demo", 2, "auto")
    assert options.config.model == str(demo_model_path())


def test_everything_that_is_said_counts(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    options = ServiceOptions.from_args(
        {
            "model": "org/repo:Q4_K_M",
            "alias": "some",
            "replicas": 3,
            "cpus": 2,
            "gpus": 0.5,
            "max_lead": 4,
            "engine": {"ctx_size": 4096, "vram": "6G", "parallel": 2},
            "limits": {"max_running": 8},
            "server": {"allowed_hosts": ["some.example"], "drop_volatile": True},
            "prompt_cache": {"ram": "1G", "folder": str(tmp_path)},
            "api_key_file": str(keys),
        }
    )
    assert (options.name, options.replicas, options.cpus, options.gpus, options.max_lead) == (
        "some",
        3,
        2,
        0.5,
        4,
    )
    assert (options.config.model, options.config.ctx_size, options.config.vram) == (
        "org/repo:Q4_K_M",
        4096,
        6 << 30,
    )
    assert (options.config.parallel, options.limits.max_running) == (2, 8)
    assert (options.tiers.ram_bytes, options.tiers.disk_folder) == (1 << 30, tmp_path)
    settings = options.settings_at("0.0.0.0")
    assert (settings.api_keys, settings.allowed_hosts, settings.drop_volatile) == (
        ("secret",),
        ("some.example",),
        True,
    )
    assert settings.host == "0.0.0.0"
    assert "secret" not in repr(options)


def test_a_plan_brings_its_own_contexts() -> None:
    assert ServiceOptions.from_args({"engine": {"plan": "some.plan"}}).config.parallel == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"modle": "x"}, "unknown key 'modle': there are model"),
        ({"engine": {"ctx": 1}}, "unknown setting ctx"),
        ({"engine": [1]}, "args.engine must be a mapping"),
        ({"limits": {"running": 1}}, "limits: unknown key 'running'"),
        ({"server": {"color": 1}}, "server: unknown key 'color'"),
        ({"server": {"host": "0.0.0.0"}}, "http_options.host"),
        ({"server": {"port": 1}}, "http_options.port"),
        ({"server": {"api_keys": ["x"]}}, "api_key_file"),
        ({"server": {"slow_headers_s": 1}}, "slow_headers_s"),
        ({"prompt_cache": {"disk": "x"}}, "prompt_cache: unknown key 'disk'"),
        ({"prompt_cache": {"ram": "much"}}, "prompt_cache.ram"),
        ({"replicas": 0}, "replicas must be"),
        ({"replicas": True}, "replicas must be"),
        ({"max_lead": -1}, "max_lead must be"),
        ({"cpus": -1}, "cpus must be"),
        ({"gpus": "1"}, "gpus must be"),
        ({"engine": {"device": "cuda"}}, "gpus is 0"),
        ({"engine": {"vram": "6G"}}, "gpus is 0"),
    ],
)
def test_what_is_no_setting_is_refused_by_its_name(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServiceOptions.from_args(args)


def test_others_may_not_reach_it_without_a_key() -> None:
    options = ServiceOptions.from_args({})
    assert options.settings_at("127.0.0.1").checks_host
    with pytest.raises(ConfigError, match=r"http_options\.host '0\.0\.0\.0'.*api_key_file"):
        options.settings_at("0.0.0.0")
    open_to_all = ServiceOptions.from_args({"server": {"allow_unprotected": True}})
    assert open_to_all.settings_at("0.0.0.0").host == "0.0.0.0"


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'coldstream\[ray\]'"):
        build({})


def test_nothing_imports_ray_before_an_application_is_built() -> None:
    code = (
        "import sys, coldstream.cli.serve, coldstream.server.serving, coldstream.ray\n"
        "import coldstream.ray.options, coldstream.ray.replica, coldstream.ray.totals\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'ray']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
