"""What a request learns of itself: its longest length, whose hits it counts, how far its prompt has come."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.engine import LLM, SamplingParams
from coldstream.kvcache.batch import CheckedSegment
from hash_runner import HashRunner, open_hash_model
from plain_loop import plain_output

CHUNK = HashRunner.chunk_size
CONTEXT = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class CountingRunner(HashRunner):
    """An even token finds two experts in memory and misses one; an odd one finds one and misses three."""

    hits = misses = 0

    @property
    def expert_uses(self) -> tuple[int, int]:
        return self.hits, self.misses

    def _launch(self, segments: Collection[CheckedSegment]) -> None:
        for segment in segments:
            num_tokens, num_odd = len(segment.token_ids), int((segment.token_ids % 2).sum())
            self.hits += 2 * num_tokens - num_odd
            self.misses += num_tokens + 2 * num_odd
        super()._launch(segments)


@pytest.fixture(scope="module")
def short_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """With room for a few tokens."""
    path = tmp_path_factory.mktemp("short") / "tiny.gguf"
    with LLM.from_opened(open_hash_model(path, ctx_size=CONTEXT)) as llm:
        yield llm


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[LLM]:
    opened = open_hash_model(tmp_path / "tiny.gguf")
    with LLM.from_opened(replace(opened, runner=CountingRunner(opened.runner.file, 256))) as llm:
        yield llm


@given(num_prompt=st.integers(1, CONTEXT - 1), max_tokens=st.none() | st.integers(1, 2 * CONTEXT))
def test_an_answer_is_as_long_as_was_asked_for_and_as_the_context_has_room_for(
    short_llm: LLM, num_prompt: int, max_tokens: int | None
) -> None:
    room = CONTEXT - num_prompt
    stream = short_llm.stream([1] * num_prompt, replace(GREEDY, max_tokens=max_tokens))
    pieces = list(islice(stream, 2 * CONTEXT))  # one that would not end is cut off here
    stream.close()
    assert sum(len(piece.token_ids) for piece in pieces) == min(room, max_tokens or room)
    assert pieces[-1].finish_reason == "length"


@pytest.mark.parametrize("asked", [(1, 2, 3), (4, 5, 6), (4, 5, 6, 7), (1, 2)])
def test_logits_leave_kept_prefixes_alone(llm: LLM, asked: tuple[int, ...]) -> None:
    params = replace(GREEDY, max_tokens=4)
    expected = plain_output(llm.opened, [1, 2, 3, 9], params).token_ids
    llm.generate([[1, 2, 3]], GREEDY)
    wanted = llm.opened.runner.logits(asked)
    assert (llm.logits(asked) == wanted).all()
    again = llm.generate([[1, 2, 3, 9]], params)[0]
    assert (again.token_ids, again.statistics.reused_tokens) == (expected, 3)


def test_the_hit_rate_is_that_of_the_request(counting: LLM) -> None:
    def rate(*prompt: int) -> float | None:
        return counting.generate([prompt], GREEDY)[0].statistics.expert_hit_rate

    assert rate(2, 4, 6) == 2 / 3
    assert rate(1, 3, 5) == 1 / 4
    assert rate(1, 3, 5, 8) == 2 / 3, "only what was computed"
    assert rate(2, 3) == 3 / 7


def test_a_request_that_used_no_expert_has_no_hit_rate(
    llm: LLM, runner: HashRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "expert_uses", (5, 1))
    assert llm.generate([[1]], GREEDY)[0].statistics.expert_hit_rate is None


def test_progress_hears_of_every_chunk(llm: LLM) -> None:
    heard: list[tuple[int, int]] = []
    list(llm.stream([1] * (2 * CHUNK + 3), GREEDY, progress=lambda *reported: heard.append(reported)))
    total = 2 * CHUNK + 3
    # The last chunk is short, so the checkpoint before the last token ends a step.
    assert heard == [(CHUNK, total), (2 * CHUNK, total), (total - 1, total), (total, total)]


@pytest.mark.parametrize(
    ("at", "num_tokens"),
    [(CHUNK, 0), (2 * CHUNK, 0), (2 * CHUNK + 3, 1)],
)
def test_cancelled_with_the_last_chunk_a_prompt_gives_its_first_token(
    llm: LLM, runner: HashRunner, at: int, num_tokens: int
) -> None:
    """What is computed is not thrown away; before that, the next chunk is not begun."""

    def cancel(done: int, total: int) -> None:
        if done == at:
            stream.cancel()

    stream = llm.stream([1] * (2 * CHUNK + 3), replace(GREEDY, max_tokens=9), progress=cancel)
    pieces = list(stream)
    assert sum(len(piece.token_ids) for piece in pieces) == num_tokens
    assert pieces[-1].finish_reason == "cancelled"
    assert runner.computed == at
