"""The website's index of result files: one line for each, with what the file itself says."""

import json
import re
from pathlib import Path

import pytest

from bench.report import result_files
from bench.report.tables import RESULTS


@pytest.mark.sharded(of="measurements")
def test_every_file_has_one_line_and_a_link_that_leads_to_it() -> None:
    links = re.findall(r"^\| \[[\w.-]+\]\(results/(\S+)\) \|", result_files.page(), re.MULTILINE)
    assert sorted(links) == sorted(path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.json"))


def test_a_line_says_what_the_file_says(tmp_path: Path) -> None:
    module = tmp_path / "speed.py"
    module.write_text('"""How fast it is: a table.\n\nMore."""')
    result = {
        "command": "python bench/speed.py a|b",
        "commit": "abc",
        "date": "2026-01-02",
        "machine": {"gpu": "A GPU", "cpu": "a CPU"},
    }
    line = result_files.row(Path("gpu/speed.json"), result, {"speed": module})
    assert line == [
        "[speed.json](results/gpu/speed.json)",
        "How fast it is",
        "`python bench/speed.py a\\|b`",
        "`abc`",
        "2026-01-02",
        "A GPU",
    ]
    assert result_files.row(Path("x.json"), {}, {})[1:] == [""] * 5


@pytest.mark.parametrize(
    ("result", "machine"),
    [
        ({"machine": {"cpu_name": "a CPU"}}, "a CPU"),
        ({"hardware": {"cpu_name": "a CPU", "gpu": {"name": "x"}}}, "a CPU"),
        ({"hardware": {"cpu_name": "a CPU"}, "machine": {"gpu": "A GPU", "cpu": "b"}}, "A GPU"),
        ({"cpu": "a CPU"}, "a CPU"),
        ({"machine": None}, ""),
    ],
)
def test_the_machine_is_the_gpu_or_the_cpu(result: dict[str, object], machine: str) -> None:
    assert result_files.machine(result) == machine


def test_commands_of_before_the_folders_find_their_modules() -> None:
    modules = result_files.module_files()
    commands = [json.loads(path.read_text()).get("command", "") for path in RESULTS.rglob("*.json")]
    present = [command for command in commands if command.startswith("python -m ")]
    assert present
    for command in present:
        assert result_files.what(command, modules), command
    assert result_files.what("python bench/startup.py", modules) == result_files.what(
        "python -m bench.engine.startup", modules
    )
