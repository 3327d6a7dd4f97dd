"""The HTTP interface: OpenAI's API and its neighbours over an `EngineClient`, wherever its engine runs."""

from coldstream.server.http.app import create_app
from coldstream.server.http.settings import ServerSettings, check_exposure, read_api_keys

__all__ = ["ServerSettings", "check_exposure", "create_app", "read_api_keys"]
