"""GET /: the page for people, and what it loads. Files of the package; nothing on it comes from elsewhere."""

import hashlib
from importlib.resources import files
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

_HTML, _CSS, _JAVASCRIPT = (
    "text/html; charset=utf-8",
    "text/css; charset=utf-8",
    "text/javascript; charset=utf-8",
)
_MODULES: Final = (
    "api.js",
    "app.js",
    "chat.js",
    "conversation.js",
    "elements.js",
    "engine.js",
    "follow.js",
    "heat_map.js",
    "kept.js",
    "list.js",
    "markdown.js",
    "message.js",
    "panels.js",
    "problems.js",
    "settings.js",
    "store.js",
    "vendor/markdown-it.esm.min.mjs",
)
PAGE_FILES: Final = {
    "/": ("index.html", _HTML),
    "/page/style.css": ("style.css", _CSS),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/page/{name}": (name, _JAVASCRIPT) for name in _MODULES},
}
"""By path: the file in `server/page/`, and its type. They hold no secrets: a key is asked for on the page."""

# Scripts, styles and pictures of this server only, none of them written into the page; requests to it only.
# No text becomes HTML or a script: browsers that know trusted types refuse `innerHTML` and its like.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
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
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": tag}

    async def answer(request: Request) -> Response:
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    router.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)
