"""ServiceOptions: what the config file of an application says, checked before anything starts. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from coldstream.assets import demo_model_path
from coldstream.engine.cache_tiers import CacheTiers
from coldstream.engine.limits import EngineLimits
from coldstream.errors import ConfigError, shown
from coldstream.planning.config import EngineConfig, parse_size
from coldstream.ray.prefix_routes import MAX_LEAD
from coldstream.server.http.settings import ServerSettings, check_exposure, read_api_keys
from coldstream.server.model_name import name_of

MAX_REPLICAS: Final = 1024
# Settings of the server that are Ray Serve's here, or that no config file should hold.
_NOT_HERE: Final[Mapping[str, str]] = {
    "host": "Ray Serve listens: give http_options.host",
    "port": "Ray Serve listens: give http_options.port",
    "slow_headers_s": "Ray Serve reads headers, and has no such limit",
    "api_keys": "config files are shown by Ray's dashboard: give api_key_file",
}


@dataclass(frozen=True)
class ServiceOptions:
    """Checked on creation: ConfigError names the setting and its range."""

    name: str  # the model's name for clients
    config: EngineConfig  # of each replica
    replicas: int = 2
    cpus: float = 1.0  # CPUs that Ray reserves for a replica; `config.threads` says how many it uses
    gpus: float = 0.0  # GPUs that Ray reserves for a replica, which sees no other
    limits: EngineLimits = field(default_factory=EngineLimits)  # of each replica
    tiers: CacheTiers = field(default_factory=CacheTiers)  # of each replica
    settings: ServerSettings = field(default_factory=ServerSettings)  # without keys and host
    api_key_file: str | None = None  # read where the server runs; None: no key is asked for
    max_lead: int = MAX_LEAD  # see `prefix_routes.py`

    def __post_init__(self) -> None:
        _check_integer("replicas", self.replicas, 1, MAX_REPLICAS)
        _check_integer("max_lead", self.max_lead, 0, 1 << 20)
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1024:
                raise ConfigError(f"{name} must be a number from 0 to 1024, not {shown(value)}")
        if not self.gpus and (self.config.device == "cuda" or self.config.vram != "auto"):
            raise ConfigError(
                "gpus is 0, so no replica would see the GPU that engine.device or engine.vram asks for: "
                "give gpus: 1"
            )

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """The options that the `args` of an application say. Raises ConfigError, also for unknown keys."""
        known = ("model", "alias", "engine", "limits", "server", "prompt_cache")
        plain = ("replicas", "cpus", "gpus", "max_lead", "api_key_file")
        for key in args:
            if key not in (*known, *plain):
                raise ConfigError(f"args: unknown key {shown(key)}: there are {', '.join((*known, *plain))}")
        model = args.get("model")
        path = str(demo_model_path()) if model is None else model
        engine = _mapping(args, "engine")
        contexts = {} if "plan" in engine else {"parallel": "auto"}
        config = EngineConfig.from_options({**contexts, **engine, "model": path})
        return cls(
            name=args.get("alias") or name_of(path),
            config=config,
            limits=EngineLimits(**_known(EngineLimits, args, "limits")),
            tiers=_tiers(_mapping(args, "prompt_cache")),
            settings=_settings(args),
            **{key: args[key] for key in plain if key in args},
        )

    def settings_at(self, host: str) -> ServerSettings:
        """The server's settings where Ray Serve listens on `host`, with the keys of `api_key_file`.

        Raises ConfigError for a file that cannot be read, and for a server that others could reach without a
        key.
        """
        keys = () if self.api_key_file is None else read_api_keys(Path(self.api_key_file))
        settings = replace(self.settings, host=host, api_keys=keys)
        try:
            check_exposure(settings)
        except ConfigError as error:
            raise ConfigError(
                f"http_options.host {shown(host)}: other machines could use this server, and no key protects "
                "it: give args.api_key_file, or listen on 127.0.0.1"
            ) from error
        return settings


def _settings(args: Mapping[str, Any]) -> ServerSettings:
    given = _known(ServerSettings, args, "server")
    for key, advice in _NOT_HERE.items():
        if key in given:
            raise ConfigError(f"server.{key}: {advice}")
    for key in ("allowed_hosts", "allowed_origins"):
        if key in given:
            given[key] = tuple(given[key])
    return ServerSettings(**given)


def _tiers(given: Mapping[str, Any]) -> CacheTiers:
    for key in given:
        if key not in ("ram", "folder"):
            raise ConfigError(f"prompt_cache: unknown key {shown(key)}: there are ram and folder")
    folder = given.get("folder")
    try:
        ram_bytes = parse_size(str(given.get("ram", 0)))
    except ValueError:
        raise ConfigError(f"prompt_cache.ram must be a size such as 6G, not {shown(given['ram'])}") from None
    return CacheTiers(ram_bytes, None if folder is None else Path(folder))


def _known(kind: type, args: Mapping[str, Any], name: str) -> dict[str, Any]:
    given = _mapping(args, name)
    names = [each.name for each in fields(kind)]
    for key in given:
        if key not in names:
            raise ConfigError(f"{name}: unknown key {shown(key)}: there are {', '.join(names)}")
    return given


def _mapping(args: Mapping[str, Any], name: str) -> dict[str, Any]:
    given = args.get(name) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"args.{name} must be a mapping of settings, not {shown(given)}")
    return dict(given)


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, not {shown(value)}")
