"""What counts as a clear error, what the figures say, and short runs over real servers."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.serving import conversations
from bench.serving.conversations import Turn, with_changed_line
from bench.serving.served import load_time, served
from coldstream.assets import demo_model_path
from tests.audits import failure_kills, failure_storm, failures
from tests.audits.failure_answers import Outcome, is_beginning, judged, judged_stream, merged, questions
from tests.audits.failure_kills import Kill, check_folder

PIECES = [("de", [-0.5]), ("f", [-0.25]), (" ma", [-1.5, -0.125]), ("in", [-2.0])]
ERROR = {"error": {"message": "the engine ended", "code": "service_unavailable"}}
RETRY = {"retry-after": "2"}


def chunks() -> list[dict[str, Any]]:
    found = [
        {"index": 0, "text": text, "logprobs": {"token_logprobs": logprobs}, "finish_reason": None}
        for text, logprobs in PIECES
    ]
    found[-1] |= {"finish_reason": "length", "stop_reason": None}
    return copy.deepcopy(found)


def events() -> list[dict[str, Any]]:
    return [{"choices": [chunk]} for chunk in chunks()]


WHOLE = merged(chunks())


def test_a_merged_stream_is_the_whole_answer() -> None:
    columns = {"token_logprobs": [-0.5, -0.25, -1.5, -0.125, -2.0]}
    ending = {"finish_reason": "length", "stop_reason": None}
    assert {"index": 0, "text": "def main", "logprobs": columns, **ending} == WHOLE
    assert judged_stream([*events(), "[DONE]"], WHOLE) == ("answered", "")


@pytest.mark.parametrize("count", range(len(PIECES)))
def test_a_stream_that_breaks_off_is_clear_with_one_error_at_its_end(count: int) -> None:
    begun = events()[:count]
    assert judged_stream([*begun, ERROR, "[DONE]"], WHOLE)[0] == "cut off"
    for unclear in ([], ["[DONE]"], [ERROR], [ERROR, ERROR, "[DONE]"], [ERROR, "[DONE]", "[DONE]"]):
        kind, _ = judged_stream([*begun, *unclear], WHOLE)
        assert kind == ("wrong" if unclear == ["[DONE]"] else "lost")


def test_an_error_behind_or_within_an_answer_is_not_clear() -> None:
    assert judged_stream([*events(), ERROR, "[DONE]"], WHOLE)[0] == "lost"
    first, *rest = events()
    assert judged_stream([first, ERROR, *rest, "[DONE]"], WHOLE)[0] == "lost"
    other = {"error": {"message": "", "code": "generation_failed"}}
    assert judged_stream([first, other, "[DONE]"], WHOLE)[0] == "lost"


@given(st.integers(0, len(PIECES) - 1), st.booleans(), st.booleans())
def test_another_token_or_one_bit_of_a_logprob_is_wrong(place: int, is_text: bool, breaks_off: bool) -> None:
    found = events()
    choice = found[place]["choices"][0]
    if is_text:
        choice["text"] += "x"
    else:
        choice["logprobs"]["token_logprobs"][0] *= 1 + 2**-52
    if breaks_off:
        found[place + 1 :] = [ERROR]
        choice["finish_reason"] = None
    assert judged_stream([*found, "[DONE]"], WHOLE)[0] == "wrong"


def test_a_beginning_has_tokens_in_order() -> None:
    for count in range(len(PIECES) + 1):
        assert is_beginning(merged(chunks()[:count]), WHOLE)
    assert not is_beginning(merged(chunks()[1:]), WHOLE)


def test_a_refusal_says_when_to_come_back() -> None:
    assert judged(200, {}, {"choices": [WHOLE]}, WHOLE) == ("answered", "")
    assert judged(200, {}, {"choices": [{**WHOLE, "text": "def"}]}, WHOLE)[0] == "wrong"
    assert judged(503, RETRY, ERROR, WHOLE) == ("refused", "")
    for headers in ({}, {"retry-after": "0"}, {"retry-after": "soon"}):
        assert judged(503, headers, ERROR, WHOLE)[0] == "lost"
    assert judged(500, RETRY, ERROR, WHOLE)[0] == "lost"
    assert judged(503, RETRY, {"error": {"code": "out_of_memory"}}, WHOLE)[0] == "lost"


def test_questions_are_the_same_for_a_seed_and_share_beginnings() -> None:
    found = questions(12, seed=1)
    assert found == questions(12, seed=1)
    assert found != questions(12, seed=2)
    assert len({each["prompt"] for each in found}) == 12
    assert len({each["prompt"][:200] for each in found}) < 12


def test_the_time_to_load_is_the_first_one() -> None:
    log = "\n".join(
        f'{{"time": "2026-01-01T00:00:{second}Z", "level": "info", "event": "{event}", "message": ""}}'
        for second, event in (("01.500", "loading"), ("03.250", "ready"), ("09.000", "ready"))
    )
    assert load_time(log) == 1.75


def kill(back_s: float | None, answered_s: float | None) -> Kill:
    return Kill(0.0, back_s is None, 2 if answered_s else 0, answered_s, 0.1, back_s, 0, 3, 20, 1 << 20)


def test_figures_of_kills() -> None:
    kills = [kill(1.0 + number / 100, 0.1) for number in range(20)] + [kill(None, None), kill(9.0, 0.5)]
    outcomes = [Outcome("answered", 0, 1, reused=9), Outcome("answered", 0, 1), Outcome("wrong", 0, 1, "x")]
    found = failure_kills.figures(kills, outcomes, limit_s=3.0)
    assert (found["kills"], found["kills_while_loading"], found["kills_with_requests"]) == (22, 1, 21)
    assert (found["in_flight"], found["prefixes_from_files"]) == (42, 66)
    assert found["back_s"] == {"median": 1.1, "p95": 1.19, "worst": 9.0}
    assert found["missed"] == ["back only after 9.0 s"]
    assert found["requests"] == {"answered": 2, "refused": 0, "cut off": 0, "wrong": 1, "lost": 0}
    assert found["answers_with_kept_prefixes"] == 1
    assert failure_kills.quantiles([]) is None


@given(st.lists(st.floats(0, 9.99), max_size=60), st.floats(-3, 3))
def test_windows_count_every_arrival_once(times: list[float], start: float) -> None:
    found = failure_storm.windows([start + at for at in times], start, 12)
    assert len(found) == 12
    assert sum(found) == len([at for at in times if start + at >= start])


@pytest.mark.parametrize(
    ("after", "back_s", "is_missed"),
    [
        ([10, 96, *[100] * 8], 2, False),
        ([10, 10, 10, 10, 94, *[100] * 5], 6, True),
        ([100] * 5 + [94] * 5, 1, True),
        ([0] * 10, None, True),
    ],
)
def test_tokens_must_come_back_soon_and_stay(after: list[int], back_s: int | None, is_missed: bool) -> None:
    found = failure_storm.recovery([80, 100, 100, 400], after)
    assert found["back_s"] == back_s
    assert bool(failure_storm.missed(found)) == is_missed


def test_the_next_turn_must_be_soon_and_little_computed_again() -> None:
    first, soon = Turn("first turn", 4.0, 8000, 0, 0), Turn("next turn", 0.2, 8060, 8000, 2048)
    found = conversations.figures([first, soon])
    assert (found["next_turn_ratio"], found["faults"], found["missed"]) == (20.0, [], [])
    found = conversations.figures([first, Turn("next turn", 0.21, 8060, 5951, 2049)])
    assert (len(found["faults"]), len(found["missed"])) == (1, 1)


@given(st.lists(st.text("ab ", max_size=4), min_size=1, max_size=30), st.floats(0, 1))
def test_one_line_is_changed(lines: list[str], depth: float) -> None:
    changed = with_changed_line("\n".join(lines), depth).split("\n")
    places = [place for place, pair in enumerate(zip(lines, changed, strict=True)) if len(set(pair)) > 1]
    assert places == [round(depth * (len(lines) - 1))]


def test_the_command_has_what_is_not_usual() -> None:
    parse = failures.parser().parse_args
    assert failures.command(parse(["--out", "a", "--parts", "storm"])) == "python -m tests.audits.failures"
    assert failures.command(parse(["--storm-s", "5"])) == "python -m tests.audits.failures --storm-s 5"


@pytest.mark.sharded(of="measurements")
def test_two_kills_are_reported_and_every_answer_is_right(tmp_path: Path) -> None:
    counts = {"count": 2, "clients": 2, "num_questions": 3}
    found = failure_kills.kills(demo_model_path(), tmp_path, threads=1, seed=1, **counts)
    assert found["faults"] == []
    assert found["kills"] == 2
    assert found["requests"]["answered"] > 0
    assert found["files_left"] > 0
    (first, *_) = (tmp_path / "cache").rglob("*.prefix")
    whole = first.read_bytes()
    first.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (first.parent / "left.tmp").write_bytes(b"")
    files, broken = check_folder(tmp_path / "cache", demo_model_path())
    assert files == found["files_left"] + 1
    assert sorted(each.partition(":")[0] for each in broken) == sorted([first.name, "left.tmp"])


@pytest.mark.sharded(of="measurements")
def test_a_storm_is_counted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_storm, "BACK_S", 1)
    found = failure_storm.storm(demo_model_path(), tmp_path, rate=50, seconds=2, calm_s=3, threads=1, seed=1)
    assert found["faults"] == []
    assert (found["requests"], sum(found["statuses"].values())) == (100, 100)
    assert 0 < found["cancelled_in_engine"] <= 100
    assert sum(found["windows_before"]) > 0 < sum(found["windows_after"])


@pytest.mark.sharded(of="measurements")
def test_a_conversation_finds_what_it_had(tmp_path: Path) -> None:
    found = conversations.turns(tmp_path, num_tokens=300, count=1, threads=1)
    assert found["faults"] == []
    kinds = found["kinds"]
    assert kinds["first turn"]["reused_tokens"] == 0
    assert kinds["next turn"]["reused_tokens"] > 300
    assert kinds["changed header"]["reused_tokens"] > 300
    assert kinds["changed line at 0%"]["reused_tokens"] < 100


@pytest.mark.sharded(of="measurements")
def test_a_server_that_ends_at_its_start_is_not_waited_for(tmp_path: Path) -> None:
    """Its log says why."""
    with (
        pytest.raises(RuntimeError, match=r"missing.gguf"),
        served(tmp_path / "missing.gguf", tmp_path / "log"),
    ):
        pass
