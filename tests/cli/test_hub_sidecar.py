"""`--spec-type mtp` for a model of the hub whose file lacks the block: the sidecar beside it drafts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hub_server import REPO, HubServer
from sidecar_files import make_whole, write_split

NAMES = "Tiny-Q8_0.gguf", "mtp-Tiny-Q8_0.gguf"
RUN = (
    f"run {REPO}:Q8_0 --device cpu --ctx-size 256 -p def -n 12 --ignore-eos --seed 1 --tree-budget 3".split()
)


@pytest.mark.sharded(of="processes")
def test_it_is_downloaded_and_changes_no_token(tmp_path: Path) -> None:
    paths = [Path(path) for path in write_split(tmp_path, make_whole(), shares=True)[1:]]
    contents = {name: path.read_bytes() for name, path in zip(NAMES, paths, strict=True)}
    texts, downloads = [], []
    with HubServer(contents) as server:
        places = {"HF_ENDPOINT": server.endpoint, "HF_HUB_CACHE": str(tmp_path / "cache")}
        environment = {**os.environ, **places, "HF_HUB_DISABLE_XET": "1", "HOME": str(tmp_path)}
        for drafts in ("--spec-type none", "--spec-type mtp --tree-budget 3"):
            command = [sys.executable, "-m", "coldstream", *RUN, *drafts.split()]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert ("tokens a step by mtp" in done.stderr) == ("mtp" in drafts)
            texts.append(done.stdout)
            downloads.append(len(server.downloads()))
    assert texts[0] == texts[1]
    assert downloads == [1, 2]
