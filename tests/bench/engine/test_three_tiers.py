"""The benchmark of three tiers, as far as it goes without a GPU: its runs, and what it holds them to."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.engine import three_tiers
from bench.peers.peer_tokens import random_tokens
from bench.runners import open_model_file, partial_plan
from builders import Dims, write_gguf
from coldstream.models.cuda.runner import CudaRunner

COUNT = 3 * three_tiers.PARTS


@pytest.mark.sharded(of="measurements")
@pytest.mark.usefixtures("gpu")
def test_runs_with_the_file_mapped_and_in_three_tiers_say_the_same(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", types={"*_exps.weight": "Q4_K"}, dims=Dims(layers=2, interval=2))
    answers = []
    for in_ram in (None, 3):
        file, spec = open_model_file(tmp_path / "tiny.gguf")
        sizes = {"context_length": 256, "chunk_size": 256, "ring_bytes": 2**22, "threads": 1}
        runner = CudaRunner.load(file, spec, partial_plan(file, spec, 2, **sizes, num_in_ram=in_ram))
        opened: Any = SimpleNamespace(runner=runner)
        answers.append(three_tiers.answered(opened, random_tokens(90, 1), COUNT))
        runner.close()
    mapped, tiers = answers
    assert len(tiers["tokens"]) == COUNT
    assert tiers["tokens"] == mapped["tokens"]
    assert mapped["disk"] is None
    assert tiers["disk"]["bytes_read"] > 0
    assert three_tiers.summary(tiers, COUNT)["tok_s"] > 0


def found(**fields: Any) -> dict[str, Any]:
    return {
        "tokens": [1, 2],
        "seconds": [9.0, 0.5, 0.25, 0.5],
        "disk": {"hits": 1},
        "kills": 0,
        "cgroup_peak": 90,
        "memory": {"VmHWM": 100, "VmLck": 80},
        **fields,
    }


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, None),
        ({"tokens": [1, 3]}, "the text depends on --ram 100"),
        ({"cgroup_peak": 101}, "--ram 100: .*'cgroup': 101"),
        ({"memory": {"VmHWM": 1, "VmPin": 101}}, "--ram 100: .*'VmPin': 101"),
        ({"kills": 1}, "--ram 100: the system ended a process"),
    ],
)
def test_another_text_or_more_memory_than_a_budget_is_no_result(
    fields: dict[str, Any], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"123")
    options = Namespace(
        model=model, budgets=[100], vram=5, prompt=1, tokens=COUNT, no_cgroup=False, fill=False
    )
    monkeypatch.setattr(
        three_tiers, "run", lambda options, ram: found(disk=None) if ram is None else found(**fields)
    )
    if said is None:
        result = three_tiers.compare(options)
        assert result["limit"] == "cgroup"
        assert result["budgets"]["100"]["tok_s"] == COUNT // three_tiers.PARTS / 0.5
        assert "tokens" not in result["mapped"]
        return
    with pytest.raises(AssertionError, match=said):
        three_tiers.compare(options)


@pytest.mark.parametrize("ram", [None, 7])
def test_without_a_cgroup_a_run_still_has_its_budget(
    ram: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"123")
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(three_tiers, "_last_line", lambda command: commands.append(command) or found())
    monkeypatch.delattr(three_tiers, "memory_limit")
    options = Namespace(model=model, vram=5, prompt=1, tokens=COUNT, no_cgroup=True, fill=False)
    assert three_tiers.run(options, ram) == found()
    (command,) = commands
    assert command[-2:] == (("--ram", "7") if ram else ("--tokens", str(COUNT)))


def test_the_memory_of_a_process_is_what_the_system_counts() -> None:
    counted = three_tiers.memory_of_process()
    assert counted["VmHWM"] > 10 * 2**20
