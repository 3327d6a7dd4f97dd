"""Replicas of a served model behind Ray Serve, with one HTTP interface in front of them.

Unit of work: one application, made from the arguments of a Ray Serve config file. Needs the extra `ray`;
nothing else of the package imports this room.
"""

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coldstream.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["build"]


def build(args: Mapping[str, Any]) -> "Application":
    """The application that `import_path: coldstream.ray:build` names, for `serve run` and `serve deploy`.

    args: see `docs/server.md`. Opens no model. Raises ConfigError for arguments that are none, and where the
    extra `ray` is not installed.
    """
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        raise ConfigError(
            "coldstream.ray needs Ray Serve, which this installation lacks: pip install 'coldstream[ray]'"
        )
    from coldstream.ray.deployment import application
    from coldstream.ray.options import ServiceOptions

    return application(ServiceOptions.from_args(args))
