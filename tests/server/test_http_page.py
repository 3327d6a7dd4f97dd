"""The files of the page as the server sends them; what they do in a browser is in `test_page.py`."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import coldstream.server
from coldstream.server.http.page import PAGE_FILES

FOLDER = Path(coldstream.server.__file__).parent / "page"
VENDOR = FOLDER / "vendor"
MAX_BYTES = 250_000  # of all files together: the page has to come quickly over a slow network too


def imports(path: str, text: str) -> Iterator[str]:
    for given in re.findall(r"""^import [^"]*"([^"]+)";""", text, re.MULTILINE):
        yield str(Path(path).parent / given) if given.startswith("./") else given


async def test_every_file_that_the_page_loads_is_sent_and_no_other(http: httpx2.AsyncClient) -> None:
    loaded, waiting = set(), {"/"}
    while waiting:
        path = waiting.pop()
        loaded.add(path)
        response = await http.get(path)
        assert response.status_code == 200
        assert response.headers["x-content-type-options"] == "nosniff"
        if path == "/":
            waiting |= {f"/{each}" for each in re.findall(r'(?:href|src)="(page/[^"]+)"', response.text)}
        elif path.endswith("js"):
            assert response.headers["content-type"] == "text/javascript; charset=utf-8"
            waiting |= set(imports(path, response.text)) - loaded
    assert loaded == set(PAGE_FILES)
    assert {each.name for each in FOLDER.iterdir() if each.is_file()} <= {n for n, _ in PAGE_FILES.values()}


async def test_the_page_is_small(http: httpx2.AsyncClient) -> None:
    sizes = {path: len((await http.get(path)).content) for path in PAGE_FILES}
    assert sum(sizes.values()) < MAX_BYTES, sizes


@pytest.mark.parametrize("path", ["/", "/page/app.js"])
async def test_a_file_that_the_browser_has_is_not_sent_again(http: httpx2.AsyncClient, path: str) -> None:
    first = await http.get(path)
    again = await http.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await http.get(path, headers={"If-None-Match": '"other"'})
    assert (other.status_code, other.content) == (200, first.content)


def test_the_vendored_library_is_unchanged_and_has_its_licence() -> None:
    readme = (VENDOR / "README.md").read_text()
    name, version, total = re.findall(r"`([\w.-]+mjs)`.*\| ([\d.]+) \|[^§]*SHA-256 is `(\w+)`", readme)[0]
    content = (VENDOR / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == total
    assert f"markdown-it {version}".encode() in content
    licence = (VENDOR / "LICENSE.markdown-it").read_text()
    assert licence.startswith(f"markdown-it {version} (MIT)")
    for part in sorted(set(re.findall(rb"node_modules/([\w.-]+)/", content))):
        assert f"\n{part.decode()} " in licence
