"""Takes the pictures of the page in `docs/`: `python -m tools.page_pictures`.

The server is a real one with the bundled model. The page imports the conversation beside this file, and the
model goes on with its last answer.
"""

import argparse
import asyncio
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, expect, sync_playwright

from coldstream.assets import demo_model_path
from coldstream.engine import EngineConfig, open_model
from coldstream.server.http import ServerSettings, create_app
from coldstream.server.local_client import LocalClient
from coldstream.server.web_server import WebServer, bind, url_of

DOCS = Path(__file__).parent.parent / "docs"
CONVERSATION = Path(__file__).with_name("page_conversation.json")
SETTINGS = {"Temperature": "0.5", "Seed": "3", "Max tokens": "40"}
PICTURES: dict[str, dict[str, Any]] = {
    "page.png": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "page_375.png": {
        "viewport": {"width": 375, "height": 667},
        "color_scheme": "dark",
        "has_touch": True,
        "is_mobile": True,
    },
}


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server with the bundled model."""
    opened = open_model(EngineConfig.from_options({"model": str(demo_model_path()), "ctx_size": 2048}))
    with LocalClient(opened, "demo") as client, bind("127.0.0.1", 0) as listener:
        server = WebServer(create_app(client, ServerSettings()), listener)
        thread = threading.Thread(target=lambda: asyncio.run(server.run()))
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.stop()
            thread.join()
    opened.close()


def picture(browser: Browser, url: str, path: Path, look: dict[str, Any]) -> None:
    """Writes a picture of the page after five messages and the end of an answer."""
    context = browser.new_context(**look, reduced_motion="reduce")
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#state")).to_have_text("ready")
    page.get_by_role("button", name="Settings", exact=True).click()
    for name, value in SETTINGS.items():
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_role("button", name="Done").click()
    page.get_by_label("File to import").set_input_files(CONVERSATION)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#messages article").last).to_have_attribute("aria-busy", "false")
    expect(page.locator(".note").last).to_contain_text("tokens/s")
    expect(page.locator("#experts-summary")).to_have_text(re.compile(r", [1-9]\d* used lately"))
    page.screenshot(path=path)
    context.close()


def main() -> None:
    """Writes all pictures."""
    parser = argparse.ArgumentParser(description="Writes the pictures of the page.")
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder to write to (docs)")
    out = parser.parse_args().out
    chromium = shutil.which("chromium")
    if chromium is None:
        parser.error("needs Chromium: apt-get install chromium")
    with serving() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, look in PICTURES.items():
            picture(browser, url, out / name, look)
        browser.close()


if __name__ == "__main__":
    main()
