"""`LLM` over a hash model: requests, streams, limits, reuse of the live state."""

import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coldstream.engine import LLM, Piece, SamplingParams
from coldstream.errors import GenerationFault, InvalidRequestError, OutOfMemoryError
from coldstream.placement.hardware import Hardware
from hash_runner import HashRunner, open_hash_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(seed=11, max_tokens=12, ignore_eos=True)


def _text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_generate_completes_every_prompt(llm: LLM) -> None:
    outputs = llm.generate(["def f(x):", "the end"], GREEDY)
    assert [output.prompt for output in outputs] == ["def f(x):", "the end"]
    for output in outputs:
        assert len(output.token_ids) == 12
        assert output.finish_reason == "length"
        assert output.text == llm.opened.tokenizer.decode(output.token_ids)
        assert output.statistics.generated_tokens == 12
        assert output.statistics.prompt_tokens == len(output.prompt_token_ids)
        assert (output.statistics.tier, output.statistics.threads) == ("hash", 1)


def test_text_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    token_ids = llm.opened.tokenizer.encode("def f(x):")
    by_text, by_ids = llm.generate("def f(x):", SEEDED)[0], llm.generate(token_ids, SEEDED)[0]
    assert by_ids.token_ids == by_text.token_ids == llm.generate([token_ids], SEEDED)[0].token_ids
    assert by_ids.prompt is None


def test_a_stream_is_the_same_answer_in_pieces(llm: LLM) -> None:
    whole = llm.generate("the", SEEDED)[0]
    pieces = list(llm.stream("the", SEEDED))
    assert _text(pieces) == whole.text
    assert tuple(itertools.chain.from_iterable(piece.token_ids for piece in pieces)) == whole.token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].statistics is not None


def test_a_drawn_seed_is_reported_and_repeats_the_answer(llm: LLM) -> None:
    params = replace(SEEDED, seed=None)
    first = llm.generate("the", params)[0]
    again = llm.generate("the", replace(params, seed=first.statistics.seed))[0]
    assert again.token_ids == first.token_ids
    assert llm.generate("the", params)[0].statistics.seed != first.statistics.seed


def test_the_seed_of_the_configuration_serves_requests_without_one(tmp_path: Path) -> None:
    opened = open_hash_model(tmp_path / "seeded.gguf")
    seeded = replace(opened.planned, config=replace(opened.config, seed=5))
    with LLM.from_opened(replace(opened, planned=seeded)) as llm:
        assert llm.generate("the", replace(SEEDED, seed=None))[0].statistics.seed == 5
        assert llm.generate("the", SEEDED)[0].statistics.seed == 11


def test_an_end_token_stops_and_is_not_text(llm: LLM) -> None:
    free = llm.generate("the", SEEDED)[0]
    end_id = llm.opened.tokenizer.special_ids["<|im_end|>"]

    def force_end(context: object, logits: np.ndarray) -> np.ndarray:
        position = len(context) - len(free.prompt_token_ids)  # type: ignore[arg-type]
        return (
            np.where(np.arange(len(logits)) == end_id, np.float32(1e4), logits) if position == 5 else logits
        )

    params = replace(SEEDED, ignore_eos=False, logits_processors=(force_end,))
    output = llm.generate("the", params)[0]
    assert output.token_ids == (*free.token_ids[:5], end_id)
    assert output.finish_reason == "stop"
    assert output.text == llm.opened.tokenizer.decode(free.token_ids[:5])


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    free = llm.generate("the", SEEDED)[0]
    stop = free.text[4:7]
    assert len(stop) == 3
    output = llm.generate("the", replace(SEEDED, stop=stop))[0]
    assert output.finish_reason == "stop"
    assert output.text == free.text[: free.text.index(stop)]
    assert output.token_ids == free.token_ids[: len(output.token_ids)]


def test_defaults_are_the_files_recommendations(tmp_path: Path) -> None:
    defaults = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with LLM.from_opened(open_hash_model(tmp_path / "defaults.gguf", default_sampling=defaults)) as llm:
        assert llm.generate("the")[0].token_ids == llm.generate("the", defaults)[0].token_ids


def test_context_overflow_is_refused_with_its_numbers_before_computing(llm: LLM, runner: HashRunner) -> None:
    with pytest.raises(InvalidRequestError, match=r"255.*--ctx-size"):
        llm.generate(["fine", "x" * 256], GREEDY)
    with pytest.raises(InvalidRequestError, match=r"256 tokens.*context of 256.*1 to 255"):
        llm.generate([[1] * 256], GREEDY)
    assert runner.computed == 0


def test_the_last_token_that_fits_is_generated(llm: LLM) -> None:
    output = llm.generate([[1] * 250], replace(GREEDY, max_tokens=None))[0]
    assert (len(output.token_ids), output.finish_reason) == (6, "length")
    assert len(llm.generate([[1] * 255], replace(GREEDY, max_tokens=None))[0].token_ids) == 1


def test_tk02_ten_million_tokens_are_refused_before_anything_is_built(llm: LLM, runner: HashRunner) -> None:
    with pytest.raises(InvalidRequestError):
        llm.stream("x" * 10**7)
    with pytest.raises(InvalidRequestError, match="10000000 tokens"):
        llm.stream(range(10**7))
    with pytest.raises(InvalidRequestError, match="10000000 tokens"):
        llm.logits(range(10**7))
    assert runner.computed == 0


def test_numpy_token_ids_are_token_ids(llm: LLM) -> None:
    ids = np.array([3, 1, 4])
    assert llm.generate(ids, GREEDY)[0].token_ids == llm.generate([3, 1, 4], GREEDY)[0].token_ids  # type: ignore[arg-type]
    assert (llm.logits(ids) == llm.logits([3, 1, 4])).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["", [], [320], [-1], [1.0], [True], ["a", 1]])
def test_prompts_that_cannot_be_served(llm: LLM, prompt: object) -> None:
    with pytest.raises(InvalidRequestError):
        llm.stream(prompt)  # type: ignore[arg-type]


def test_a_prompt_that_extends_the_live_sequence_computes_only_the_rest(llm: LLM, runner: HashRunner) -> None:
    first = llm.generate([[1, 2, 3]], GREEDY)[0]
    assert runner.computed == 3 + 11
    longer = [1, 2, 3, *first.token_ids, 7, 8]
    second = llm.generate([longer], GREEDY)[0]
    assert second.statistics.reused_tokens == 14
    assert runner.computed == 14 + 3 + 11
    assert llm.generate([[9]], GREEDY)[0].statistics.reused_tokens == 0
    assert llm.generate([longer], GREEDY)[0].token_ids == second.token_ids


def test_a_chat_that_goes_on_reuses_what_it_said(llm: LLM) -> None:
    messages = [{"role": "user", "content": "def"}]
    end_id = llm.opened.tokenizer.special_ids["<|im_end|>"]

    def say_the(context: object, logits: np.ndarray) -> np.ndarray:
        wanted = llm.opened.tokenizer.encode(" the")[0] if context[-1] != end_id else end_id  # type: ignore[index]
        said = context[-1] == llm.opened.tokenizer.encode(" the")[0]  # type: ignore[index]
        return np.where(np.arange(len(logits)) == (end_id if said else wanted), np.float32(1e4), logits)

    params = SamplingParams(temperature=0.0, logits_processors=(say_the,))
    (answer,) = llm.chat(messages, params)
    assert (answer.text, answer.finish_reason) == (" the", "stop")
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "and"}]
    (again,) = llm.chat(messages, params)
    assert again.statistics.reused_tokens == answer.statistics.prompt_tokens + 1


def test_chat_encodes_control_tokens_of_messages_as_text(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "<|im_end|>"}], GREEDY)
    end_id = llm.opened.tokenizer.special_ids["<|im_end|>"]
    assert output.prompt_token_ids.count(end_id) == 1


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "tokenize"])
def test_tm03_settings_that_shadow_the_renderers_arguments_are_refused(llm: LLM, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        llm.chat([{"role": "user", "content": "def"}], GREEDY, chat_template_kwargs={name: True})


def test_cancel_ends_with_a_last_piece(llm: LLM, runner: HashRunner) -> None:
    stream = llm.stream("the", replace(GREEDY, max_tokens=None))
    pieces = [next(stream) for _ in range(3)]
    stream.cancel()
    pieces += stream
    assert pieces[-1].finish_reason == "cancelled"
    assert pieces[-1].statistics is not None
    assert pieces[-1].statistics.generated_tokens == 3
    assert llm.generate("the", GREEDY)[0].finish_reason == "length"


def test_cancel_during_a_long_prompt(llm: LLM, runner: HashRunner) -> None:
    def cancel_half_way(done: int, total: int) -> None:
        if done >= 50:
            stream.cancel()

    stream = llm.stream([1] * 100, GREEDY, progress=cancel_half_way)
    (only,) = stream
    assert only.finish_reason == "cancelled"
    assert runner.computed == 56
    assert llm.generate([[1] * 100], GREEDY)[0].statistics.reused_tokens == 0


def test_closing_a_stream_frees_the_model_and_keeps_the_state(llm: LLM) -> None:
    whole = llm.generate([[1, 2]], GREEDY)[0]
    with llm.stream([1, 2], GREEDY) as stream:
        drawn = [next(stream).token_ids[0] for _ in range(4)]
    assert tuple(drawn) == whole.token_ids[:4]
    assert llm.generate([[1, 2, *drawn]], GREEDY)[0].statistics.reused_tokens == 5


def test_dropping_a_stream_gives_the_model_free(llm: LLM) -> None:
    stream = llm.stream("the", SEEDED)
    next(stream)
    del stream
    assert llm.generate("the", SEEDED)


def test_a_stream_can_be_cancelled_from_another_thread(llm: LLM) -> None:
    stream = llm.stream("the", replace(GREEDY, max_tokens=None))
    next(stream)
    thread = threading.Thread(target=stream.cancel)
    thread.start()
    thread.join()
    assert list(stream)[-1].finish_reason == "cancelled"


def test_after_a_failure_the_next_answer_is_right(llm: LLM, runner: HashRunner) -> None:
    expected = llm.generate([[1, 2]], GREEDY)[0].token_ids
    runner.fail_at = 5
    with pytest.raises(RuntimeError, match="made to fail"):
        llm.generate([[1, 2]], GREEDY)
    runner.fail_at = None
    again = llm.generate([[1, 2]], GREEDY)[0]
    assert (again.token_ids, again.statistics.reused_tokens) == (expected, 0)


def test_trap_50_damaged_logits_fail_the_request_and_only_it(llm: LLM) -> None:
    def damage(context: object, logits: np.ndarray) -> np.ndarray:
        return np.full_like(logits, np.nan)

    with pytest.raises(GenerationFault):
        llm.generate("the", replace(SEEDED, logits_processors=(damage,)))
    assert len(llm.generate("the", SEEDED)[0].token_ids) == 12


def test_logits_are_one_row_per_token(llm: LLM) -> None:
    rows = llm.logits([3, 1, 4])
    assert rows.shape == (3, 320)
    assert rows.dtype == np.float32
    output = llm.generate([[3, 1, 4]], replace(GREEDY, max_tokens=1))[0]
    assert output.token_ids == (int(np.argmax(rows[2])),)


def test_logits_that_would_not_fit_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = replace(Hardware.measure(), ram_available_bytes=100_000)
    monkeypatch.setattr(Hardware, "measure", lambda: hardware)
    with pytest.raises(OutOfMemoryError, match=r"logits of 100 tokens need .* GiB are free"):
        llm.logits([1] * 100)


def test_a_closed_llm_says_so(llm: LLM, runner: HashRunner) -> None:
    started, waiting = llm.stream("the", SEEDED), llm.stream("the", SEEDED)
    next(started)
    llm.close()
    llm.close()
    assert runner.closed
    for stream in (started, waiting):
        with pytest.raises(InvalidRequestError, match="closed"):
            next(stream)
    with pytest.raises(InvalidRequestError, match="closed"):
        llm.generate("the")


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_model_is_not_pickled_or_copied(llm: LLM, duplicate: Callable[[object], object]) -> None:
    with pytest.raises(InvalidRequestError, match="open the model where it is needed"):
        duplicate(llm)
    assert llm.generate("still here", GREEDY)[0].text


def test_twenty_requests_in_a_row_stay_right(llm: LLM) -> None:
    prompts = [[1, 2], [1, 2, 3], [4], [1, 2]] * 5
    answers: dict[tuple[int, ...], tuple[int, ...]] = {}
    for prompt in prompts:
        output = llm.generate([prompt], SEEDED)[0]
        assert answers.setdefault(tuple(prompt), output.token_ids) == output.token_ids
