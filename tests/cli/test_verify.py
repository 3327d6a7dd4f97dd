"""`coldstream verify`: table, exit code, JSON and report, of equal parts and of one that differs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import write_gguf
from coldstream.assets import demo_drafter_path
from coldstream.cli import verify as verb
from coldstream.engine import EngineConfig, verification
from coldstream.engine.verification import Verification

Run = Callable[..., tuple[int, str, str]]
NAMES = ["CPU, largest budget", "CPU, middle budget", "CPU, smallest budget", "CPU, drafts"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    types = {"*_exps.weight": "Q4_K"}
    return str(write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", types=types)[0])


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="module")
def found() -> list[Verification]:
    """The one with a part that differs, once a test has asked for it: it takes seconds."""
    return []


@pytest.fixture
def _planted(monkeypatch: pytest.MonkeyPatch, found: list[Verification]) -> None:
    """The part with drafts sees fewer positions, and so computes something else."""
    make, verify = verification._with_drafts, verification.verify

    def verify_once(*given: Any) -> Verification:
        if not found:
            found.append(verify(*given))
        return found[0]

    monkeypatch.setattr(
        verification, "_with_drafts", lambda *given: replace(make(*given), attention_window=4)
    )
    monkeypatch.setattr(verification, "verify", verify_once)


@pytest.mark.sharded(of="processes")
def test_a_table_of_all_parts_and_the_exit_code_of_equal_tokens(run: Run, tiny: str) -> None:
    code, out, error = run("verify", tiny, "--threads", "2")
    assert code == 0
    assert [name for name in [*NAMES, "GPU", "CPU, one thread"] if f"\n{name}  " in out][:4] == NAMES
    assert out.count(" the same") == 4
    assert "DIFFERENT" not in out + error
    assert "not run: GPU: device cuda" in error
    assert "4 of 4 parts that ran gave what the first one gave" in error
    assert "minutes" in error


@pytest.mark.usefixtures("_planted")
def test_a_difference_is_shown_and_the_exit_code_says_so(run: Run, tiny: str) -> None:
    code, out, error = run("verify", tiny, "--threads", "2")
    assert code == verb.DIFFERENT != 0
    assert out.count("DIFFERENT") == 1
    assert "DIFFERENT: CPU, drafts: " in error
    assert "3 of 4 parts" in error


@pytest.mark.usefixtures("_planted")
def test_json_has_the_difference_and_the_same_exit_code(run: Run, tiny: str) -> None:
    code, out, error = run("verify", tiny, "--threads", "2", "--json")
    assert (code, error) == (verb.DIFFERENT, "")
    document = json.loads(out)
    assert document["passed"] is False
    assert [part["name"] for part in document["parts"]][:4] == NAMES
    assert [bool(part["difference"]) for part in document["parts"]].count(True) == 1
    assert [part["name"] for part in document["parts"] if part["not_run_because"]] == ["GPU"]


@pytest.mark.sharded(of="processes")
def test_the_report_has_what_the_table_has(run: Run, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    code, out, _ = run("verify", tiny, "--threads", "2", "--minutes", "5", "--report", str(path), "--json")
    assert code == 0
    page = path.read_text()
    for part in json.loads(out)["parts"]:
        assert part["name"] in page
        if part["decode"]:
            assert f"{part['decode']:.1f} tok/s" in page
            assert f"{part['perplexity']:.4f}" in page
    assert "`verify`: threads 2, minutes 5.0" in page
    assert "not run: GPU: device cuda" in page
    assert str(tmp_path) not in page
    assert json.loads(page.split("```json\n")[1].split("\n```")[0]) == json.loads(out)


def test_where_nothing_is_compared_it_says_so(run: Run, tiny: str) -> None:
    code, out, error = run("verify", tiny, "--threads", "2", "--minutes", "1e-9")
    assert code == 0
    assert out.count("not run") == 5
    assert "nothing was compared" in error
    assert "gave what the first one gave" not in error


def test_a_report_that_cannot_be_written_is_refused_before_the_work(run: Run, tiny: str) -> None:
    code, _, error = run("verify", tiny, "--report", "/nonexistent/report.md")
    assert code == 2
    assert "--report" in error


def test_the_bundled_model_drafts_with_its_own_drafter(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def verify(config: EngineConfig, *others: object) -> Verification:
        asked.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(verification, "verify", verify)
    run("verify")
    run("verify", "--model-draft", "mine.gguf")
    assert [config.model_draft for config in asked] == [str(demo_drafter_path()), "mine.gguf"]


@pytest.mark.parametrize("minutes", ["0", "-1", "10.5", "x"])
def test_minutes_are_above_0_and_at_most_10(run: Run, minutes: str) -> None:
    assert run("verify", "--minutes", minutes)[0] == 2
