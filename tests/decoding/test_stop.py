"""Stop strings: the text let through never depends on where the stream is split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding.stop import StopMatcher

texts = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def _run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    return shown + matcher.flush(), matcher.matched


def _by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(stop_lists, st.lists(texts, max_size=8))
def test_streaming_equals_the_definition_on_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    assert _run(stops, pieces) == _by_definition(stops, "".join(pieces))


@given(stop_lists, texts)
def test_nothing_is_withheld_without_need(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(character) for character in text)
    held = matcher.flush()
    if matcher.matched is None:
        assert shown + held == text
        assert not held or any(stop.startswith(held) for stop in stops)


@given(stop_lists, st.lists(texts, max_size=8), st.lists(texts, max_size=8))
def test_a_stop_string_that_may_not_end_yet_is_text(
    stops: list[str], early: list[str], late: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece, may_end=False) for piece in early)
    shown += "".join(matcher.feed(piece) for piece in late) + matcher.flush()
    text, boundary = "".join(early + late), len("".join(early))
    for end in range(boundary + 1, len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(complete, key=len)
            assert (shown, matcher.matched) == (text[: end - len(longest)], longest)
            return
    assert (shown, matcher.matched) == (text, None)


@given(stop_lists, st.lists(texts, max_size=8))
def test_an_included_stop_string_is_shown_and_nothing_after_it(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops, include=True)
    shown = "".join(matcher.feed(piece) for piece in pieces) + matcher.flush()
    before, matched = _by_definition(stops, "".join(pieces))
    assert (shown, matcher.matched) == (before + (matched or ""), matched)


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["Hello", " wor", "ld\n", "\nUser:", " more"], "Hello world"),
        (["\n\nUser:"], ""),
        (["a\n", "b\n\nUse", "r; no stop"], "a\nb\n\nUser; no stop"),
    ],
)
def test_a_stop_string_across_pieces(pieces: list[str], shown: str) -> None:
    assert _run(["\n\nUser:"], pieces)[0] == shown
