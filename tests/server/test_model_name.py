"""What a model is called that was given no name."""

import os
from pathlib import Path

from coldstream.server.model_name import name_of


def test_a_hub_name_stays_and_a_file_loses_its_folder_and_ending(tmp_path: Path) -> None:
    assert name_of("org/repo:Q4_K_M") == "org/repo:Q4_K_M"
    assert name_of("https://huggingface.co/org/repo/tree/main") == "org/repo"
    assert name_of(__file__) == "test_model_name.py"
    (tmp_path / "some.gguf").touch()
    assert name_of(str(tmp_path / "some.gguf")) == "some"


def test_a_name_that_is_no_text_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"d\xe9mo.gguf")
    path.touch()
    assert name_of(str(path)) == "d\\udce9mo"
