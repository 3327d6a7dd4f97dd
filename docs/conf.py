"""Settings of Sphinx for the website of these pages, which `make site` builds into build/site."""

import tomllib
from importlib import metadata
from pathlib import Path

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]

project = _PROJECT["name"]
release = metadata.version(project)
html_title = f"{project} {release.partition('+')[0]}"
# Where the website is. The links in it are relative, so that it works anywhere.
html_baseurl = _PROJECT.get("urls", {}).get("Documentation", "")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_copy_source = False
exclude_patterns = ["results"]

# Anchors as GitHub makes them, of headings at all depths. A link to one that no heading has is a warning.
myst_heading_anchors = 6

# Docstrings are plain text with code between single backticks.
default_role = "code"
add_module_names = False
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
