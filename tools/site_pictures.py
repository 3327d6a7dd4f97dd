"""Takes the pictures of the website's first page in `docs/`: `make site && python -m tools.site_pictures`."""

import argparse
import shutil
from pathlib import Path
from typing import Final, Literal

from playwright.sync_api import sync_playwright

ROOT: Final = Path(__file__).parent.parent
SIZE: Final = {"width": 1280, "height": 800}
SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")


def main() -> None:
    """Writes one picture for each colour scheme that a reader's system may prefer."""
    parser = argparse.ArgumentParser(description="Writes the pictures of the website's first page.")
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site", help="what `make site` built")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="the folder to write to (docs)")
    arguments = parser.parse_args()
    first_page, chromium = arguments.site.resolve() / "index.html", shutil.which("chromium")
    if not first_page.is_file():
        parser.error(f"there is no {first_page}: run `make site`")
    if chromium is None:
        parser.error("needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in SCHEMES:
            page = browser.new_page(viewport=SIZE, color_scheme=scheme, reduced_motion="reduce")
            page.goto(first_page.as_uri())
            page.screenshot(path=arguments.out / f"site_{scheme}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
