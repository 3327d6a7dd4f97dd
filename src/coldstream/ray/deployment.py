"""The two deployments of an application: replicas that compute, and one server that speaks HTTP for them."""

from typing import Any, Final

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle

from coldstream.ray.client import ReplicasClient
from coldstream.ray.options import ServiceOptions
from coldstream.ray.prefix_router import PrefixRouter
from coldstream.ray.prefix_routes import PrefixRoutes
from coldstream.ray.replica import EngineReplica
from coldstream.server.http.app import create_app

REPLICA: Final = "Replica"
SERVER: Final = "Server"
# Engines refuse what they have no room for, with an error that says so; Ray would let it wait without a
# limit.
_MAX_REQUESTS: Final = 1 << 17
_LIFE: Final = {
    "graceful_shutdown_timeout_s": 30.0,  # for answers under way
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 30.0,
}


class Replica(EngineReplica):
    """An `EngineReplica` under the name that Ray Serve gave it."""

    def __init__(self, options: ServiceOptions) -> None:
        super().__init__(options, serve.get_replica_context().replica_id.unique_id)

    def __del__(self) -> None:
        """Called by Ray when the replica ends, also one whose model could not be opened."""
        if hasattr(self, "_client"):
            self.close()


@serve.ingress()
class Server:
    """The HTTP interface. One process, as it alone knows what it has sent where."""

    def __init__(self, replicas: DeploymentHandle, options: ServiceOptions) -> None:
        """Raises ConfigError for what `ServiceOptions.settings_at` refuses."""
        self._settings = options.settings_at(_listening_host())
        routes = PrefixRoutes(max_lead=options.max_lead)
        self._client = ReplicasClient(replicas, options.name, options.replicas, routes)

    def __del__(self) -> None:
        """Called by Ray when the server ends, also one that was refused."""
        if hasattr(self, "_client"):
            self._client.close()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._client, self._settings)


def application(options: ServiceOptions) -> Any:
    """The Ray Serve application of these options. Starts nothing."""
    replicas = serve.deployment(
        Replica,
        name=REPLICA,
        num_replicas=options.replicas,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        max_ongoing_requests=_MAX_REQUESTS,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        **_LIFE,
    )
    server = serve.deployment(
        Server,
        name=SERVER,
        ray_actor_options={"num_cpus": 0},  # Ray sets cores aside for those that compute
        max_ongoing_requests=_MAX_REQUESTS,
        **_LIFE,
    )
    return server.bind(replicas.bind(options), options)


def _listening_host() -> str:
    """Where Ray Serve's proxies of this cluster listen. Ray has no public name for it."""
    return str(_get_global_client().http_config.host)
