"""Comparisons with another commit: pairs, intervals, what fails, and a small one from end to end."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from typing import Any

import pytest

from bench.engine import versus_commit
from bench.engine.commit_lines import DEMO_CPU, LINES, Line, ServerLine
from bench.engine.versus_commit import compared, median_interval, merged
from bench.results import ROOT
from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from own_checkout import checkout_of_this
from tools.checkouts import check_out


@dataclass
class Played:
    """A commit whose runs have these speeds and tokens. asked: of both, in order."""

    name: str
    rates: list[float]
    asked: list[tuple[str, int]]
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def run(self, number: int) -> tuple[float, Any]:
        self.asked.append((self.name, number))
        return self.rates[number], self.tokens.get(number, [number])


def both(new: list[float], old: list[float]) -> tuple[Played, Played]:
    asked: list[tuple[str, int]] = []
    return Played("new", new, asked), Played("old", old, asked)


def test_commits_begin_alternately_and_the_first_run_does_not_count() -> None:
    new, old = both([1.0, 20.0, 30.0, 40.0], [9.0, 10.0, 10.0, 10.0])
    found = compared(new, old, pairs=3)
    assert found["new_tok_s"] == [20.0, 30.0, 40.0]
    assert (found["ratio"], found["interval"], found["is_slower"]) == (3.0, [2.0, 4.0], False)
    assert Counter(new.asked) == {(name, number): 1 for name in ("new", "old") for number in range(4)}
    first = [name for name, number in new.asked[2:]][::2]
    assert set(first) == {"new", "old"}


def test_a_line_is_slower_if_all_of_its_interval_is() -> None:
    for rates, is_slower in (([96.9] * 7, True), ([97.0] * 7, False), ([90.0] * 6 + [97.1], False)):
        found = compared(*both([100.0, *rates], [100.0] * 8), pairs=7)
        assert found["is_slower"] == is_slower


def test_texts_that_differ_end_the_run() -> None:
    new, old = both([1.0] * 4, [1.0] * 4)
    old.tokens[2] = [7]
    with pytest.raises(RuntimeError, match="run 2"):
        compared(new, old, pairs=3)


@pytest.mark.parametrize("count", [6, 7, 9, 15, 30])
def test_an_interval_is_the_narrowest_that_is_certain_enough(count: int) -> None:
    low, high = median_interval([*range(count)])
    assert low == count - 1 - high

    def certainty(place: int) -> float:
        return 1 - 2 * sum(comb(count, i) for i in range(place + 1)) / 2**count

    assert certainty(int(low)) >= 0.95 > certainty(int(low) + 1)


def test_less_than_six_values_give_their_range() -> None:
    assert median_interval([3.0]) == (3.0, 3.0)
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_no_run_of_a_line_begins_like_another_one() -> None:
    assert len({line.name for line in LINES}) == len(LINES)
    all_prompts: list[tuple[str, int, int]] = []
    for line in LINES:
        if isinstance(line, Line) and line.counted == "part":
            room = line.setting.ctx_size - line.prompt_tokens
            assert line.request(3) == line.request(4)
            assert line.request(0)["longest"] == room >= 16 * line.new_tokens
        elif isinstance(line, Line):
            prompts = [tuple(prompt[:4]) for run in range(10) for prompt in line.request(run)["prompts"]]
            assert len(prompts) == 10 * line.prompts
            all_prompts += [(line.setting.model, *prompt[:2]) for prompt in prompts]
            assert line.request(3) == line.request(3)
            assert line.prompt_tokens + line.new_tokens <= line.setting.ctx_size
    assert len(set(all_prompts)) == len(all_prompts)


def test_a_rate_counts_what_the_line_is_about() -> None:
    answer = {"seconds": 8.0, "first_token_s": 2.0, "generation_s": 4.0}
    for counted, rate in (("prompt", 50.0), ("text", 10.0), ("all", 10.25), ("part", 10.25)):
        line = Line("a", DEMO_CPU, counted, prompts=2, prompt_tokens=100, new_tokens=41)  # type: ignore[arg-type]
        assert line.rate(answer) == rate


def test_new_lines_are_merged_with_those_of_the_file(tmp_path: Path) -> None:
    path, names = tmp_path / "lines.json", [line.name for line in LINES[:3]]
    assert merged(path, {names[1]: {"ratio": 1}}) == {names[1]: {"ratio": 1}}
    path.write_text(json.dumps({"lines": {names[2]: {"ratio": 2}, names[1]: {"ratio": 3}, "gone": {}}}))
    found = merged(path, {names[1]: {"ratio": 1}, names[0]: {"ratio": 0}})
    assert [*found.items()] == [(name, {"ratio": i}) for i, name in enumerate(names)]


@pytest.mark.sharded(of="measurements")
def test_two_commits_are_compared_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This checkout beside itself, with a text of a few tokens and a server for a moment."""
    lines = (
        Line("a", DEMO_CPU, "text", new_tokens=8),
        ServerLine("b", DEMO_CPU, clients=2, seconds=0.5),
        Line("c", DEMO_CPU, "all", prompts=2, new_tokens=3),
        Line("d", DEMO_CPU, "part", new_tokens=3),
    )
    monkeypatch.setattr(versus_commit, "LINES", lines)
    monkeypatch.chdir(tmp_path)
    old = str(checkout_of_this(tmp_path / "old"))
    words = ["versus_commit", "--against", "self", "--old", old, "--pairs", "1", "--threads", "1"]
    monkeypatch.setattr("sys.argv", [*words, "--lines", "[abd]", "--out", "out.json"])
    assert versus_commit.main() in (0, 1)  # a busy machine may make any side the slower one
    found = json.loads(Path("out.json").read_text())
    assert found["against"] == "self"
    assert [*found["lines"]] == ["a", "b", "d"]
    for line in found["lines"].values():
        assert len(line["new_tok_s"]) == len(line["old_tok_s"]) == 1
        assert line["interval"] == [line["ratio"]] * 2
        assert (
            line["command"] == "python -m bench.engine.versus_commit --against self --pairs 1 --lines '[abd]'"
        )


@pytest.mark.sharded(of="measurements")
def test_parts_of_a_text_are_those_of_the_whole(tmp_path: Path) -> None:
    whole = Line("a", DEMO_CPU, "text", new_tokens=9)
    parts = Line("a", DEMO_CPU, "part", new_tokens=3)
    commit = versus_commit.Commit("self", Path(sys.executable))
    arguments = DEMO_CPU.arguments(str(demo_model_path()), 1, None)
    worker = versus_commit.Worker(commit, arguments, tmp_path)
    try:
        _, [expected] = versus_commit.LineRuns(whole, worker).run(0)
        found = [versus_commit.LineRuns(parts, worker).run(number)[1][0] for number in range(3)]
    finally:
        worker.close()
    assert [token for run in found for token in run] == expected


@pytest.mark.sharded(of="measurements")
def test_a_commit_is_checked_out_whole(tmp_path: Path) -> None:
    folder = tmp_path / "sources"
    check_out(ROOT, "HEAD", folder)
    with GGUFFile.open(folder / "src" / "coldstream" / "assets" / "demo.gguf") as file:
        assert file.tensors
    assert [*tmp_path.iterdir()] == [folder]
    with pytest.raises(subprocess.CalledProcessError):
        check_out(ROOT, "no-such-commit", tmp_path / "other")
