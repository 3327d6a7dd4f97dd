"""GET /: the page for people, and what it loads. Files of the package; nothing on it comes from elsewhere."""

from importlib.resources import files
from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

_HTML, _CSS, _JAVASCRIPT = (
    "text/html; charset=utf-8",
    "text/css; charset=utf-8",
    "text/javascript; charset=utf-8",
)
PAGE_FILES: Final = {
    "/": ("index.html", _HTML),
    "/page/style.css": ("style.css", _CSS),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page/app.js": ("app.js", _JAVASCRIPT),
    "/page/api.js": ("api.js", _JAVASCRIPT),
    "/page/chat.js": ("chat.js", _JAVASCRIPT),
    "/page/engine.js": ("engine.js", _JAVASCRIPT),
    "/page/heat_map.js": ("heat_map.js", _JAVASCRIPT),
    "/page/settings.js": ("settings.js", _JAVASCRIPT),
}
"""By path: the file in `server/page/`, and its type. They hold no secrets: a key is asked for on the page."""

# Scripts, styles and pictures of this server only, none of them written into the page; requests to it only.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    """A route for each file, read once."""
    router = APIRouter()
    for path, (name, media_type) in PAGE_FILES.items():
        content = (files("coldstream.server") / "page" / name).read_bytes()
        _add(router, path, content, media_type)
    return router


def _add(router: APIRouter, path: str, content: bytes, media_type: str) -> None:
    async def answer() -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    router.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)
