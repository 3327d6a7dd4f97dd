"""An answer that ends within an accepted run: text, tokens, log-probabilities and counts end where they do
without drafts, at every place of the run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scripted_drafts import Scripted, check_same
from test_drafts import Pair

from coldstream.assets import demo_model_path
from coldstream.decoding import FixedSizes, Grammar, Logits
from coldstream.engine import RequestOutput, SamplingParams

PROMPT = "def add(a, b):\n"
TEXT = "    naïve = '→😀'\n    return b"  # of tokens that are single bytes, words, and parts of a character
LONGEST = 40  # nodes, so that a whole answer is one accepted run


@dataclass(frozen=True)
class Said:
    """A logits processor that has the model say these tokens."""

    num_prompt: int
    token_ids: tuple[int, ...]

    def __call__(self, context: Sequence[int], logits: Logits) -> Logits:
        changed = np.array(logits)
        changed[self.token_ids[len(context) - self.num_prompt]] = 1e4
        return changed


@pytest.fixture(scope="module")
def demo() -> Iterator[Pair]:
    pair = Pair(demo_model_path())
    yield pair
    pair.close()


def said(demo: Pair, token_ids: Sequence[int]) -> SamplingParams:
    num_prompt = len(demo.opened.tokenizer.encode(PROMPT))
    return SamplingParams(
        temperature=0,
        max_tokens=len(token_ids),
        logprobs=1,
        logits_processors=[Said(num_prompt, tuple(token_ids))],
    )


def check_end(demo: Pair, token_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
    """The answer; both ways. `token_ids` are drafted, beyond its end as well."""
    plain = demo.expected(PROMPT, params)
    drafter = Scripted("right", {plain.prompt_token_ids: tuple(token_ids)}, demo.vocab_size)
    (drafted,) = demo.speculating(drafter, FixedSizes(LONGEST)).generate(PROMPT, params)
    check_same(plain, drafted)
    num_tokens = len(drafted.token_ids)
    assert drafted.statistics.generated_tokens == num_tokens == len(drafted.outputs[0].logprobs)
    assert num_tokens <= params.max_tokens
    speculation = drafted.statistics.speculation
    found = (0, 0) if speculation is None else (speculation.steps, speculation.accepted)
    assert found == ((1, num_tokens - 2) if num_tokens > 2 else (num_tokens - 1, 0))
    return drafted


def tokens_of(demo: Pair) -> list[int]:
    token_ids = list(demo.opened.tokenizer.encode(TEXT))
    assert len(token_ids) < LONGEST
    assert any("\ufffd" in demo.opened.tokenizer.decode([each]) for each in token_ids), (
        "a part of a character"
    )
    return token_ids


@pytest.mark.sharded(of="models on the CPU")
def test_sp06_the_most_tokens_end_a_run_at_every_token(demo: Pair) -> None:
    token_ids = tokens_of(demo)
    for count in range(1, len(token_ids) + 1):
        output = check_end(demo, token_ids, replace(said(demo, token_ids), max_tokens=count))
        assert (output.token_ids, output.finish_reason) == (tuple(token_ids[:count]), "length")


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("is_eos", [True, False], ids=["end", "stop token"])
def test_sp06_an_end_token_ends_a_run_at_every_token(demo: Pair, is_eos: bool) -> None:
    token_ids = tokens_of(demo)
    end_id = min(demo.opened.tokenizer.eos_ids) if is_eos else demo.vocab_size - 9
    for at in range(len(token_ids)):
        ended = [*token_ids[:at], end_id, *token_ids[at:]]
        params = replace(said(demo, ended), stop_token_ids=() if is_eos else [end_id])
        output = check_end(demo, ended, params)
        assert (output.token_ids, output.finish_reason) == (tuple(ended[: at + 1]), "stop")


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("length", [1, 3])
def test_sp06_a_stop_string_ends_a_run_at_every_character(demo: Pair, length: int) -> None:
    """Also one that begins in one token and ends in another, or within the bytes of a character."""
    token_ids = tokens_of(demo)
    for at in range(len(TEXT) - length + 1):
        stop = TEXT[at : at + length]
        output = check_end(demo, token_ids, replace(said(demo, token_ids), stop=stop))
        assert (output.text, output.outputs[0].stop_reason) == (TEXT[: TEXT.index(stop)], stop)


@pytest.mark.sharded(of="models on the CPU")
def test_sp06_the_earlier_of_a_stop_string_and_the_most_tokens_counts(demo: Pair) -> None:
    token_ids = tokens_of(demo)
    needed = len(check_end(demo, token_ids, replace(said(demo, token_ids), stop="return")).token_ids)
    for count in range(needed - 2, needed + 3):
        params = replace(said(demo, token_ids), stop="return", max_tokens=count)
        output = check_end(demo, token_ids, params)
        assert output.finish_reason == ("stop" if count >= needed else "length")
        assert len(output.token_ids) == min(count, needed)


def test_sp06_a_grammar_ends_a_run_at_every_letter(demo: Pair) -> None:
    for count in range(1, 9):
        params = SamplingParams(
            temperature=0, max_tokens=20, logprobs=1, grammar=Grammar("regex", f"[a-z]{{{count}}}")
        )
        plain = demo.expected(PROMPT, params)
        assert plain.finish_reason == "stop"
        output = check_end(demo, [*plain.token_ids, 5, 6, 7], params)
        assert len(output.text) == count
