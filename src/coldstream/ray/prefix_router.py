"""PrefixRouter: asks each request where it wants to go, for the handles of Ray Serve.

Ray makes one router for each process with a handle and tells it which replicas there are; the server makes a
`Route` for each request, whose `PrefixRoutes` decides.
"""

from collections.abc import Sequence
from typing import Final

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from coldstream.ray.prefix_routes import PrefixRoutes

ROUTE_ARGUMENT: Final = 3  # place of the route among the arguments of `EngineReplica.submit`


class Route:
    """How one request finds its replica. It goes with the request as far as the router of this process; what
    a replica gets instead is None.
    """

    def __init__(self, routes: PrefixRoutes, request_id: int, keys: Sequence[int]) -> None:
        """keys: of the prompt's blocks."""
        self._routes = routes
        self._request_id = request_id
        self._keys = keys

    def choose(self, replicas: Sequence[str]) -> str:
        """See `PrefixRoutes.choose`."""
        return self._routes.choose(self._request_id, self._keys, replicas)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that its route chooses."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica alone: if it does not take the request, Ray asks again, and the route chooses
        another.
        """
        assert pending_request is not None, "Ray Serve routes requests, and nothing without one"
        pending_request.routing_context.should_backoff = True  # before it asks again
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        route = pending_request.args[ROUTE_ARGUMENT]
        return [[replicas[route.choose(list(replicas))]]]
