"""`LLM` on a complete tiny model through the compiled kernels: everything joined up."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builders import make_model, write_gguf, write_model
from coldstream import LLM, SamplingParams
from coldstream.assets import demo_model_path
from coldstream.errors import ConfigError, ModelNotFoundError, TemplateError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(seed=3, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("real") / "tiny.gguf")[0]


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, threads=2) as llm:
        yield llm


def test_greedy_tokens_are_the_best_of_the_logits(llm: LLM) -> None:
    output = llm.generate("def f(x):", GREEDY)[0]
    sequence = [*output.prompt_token_ids, *output.token_ids]
    rows = llm.logits(sequence[:-1])
    assert rows.shape == (len(sequence) - 1, 320)
    assert rows.dtype == np.float32
    assert np.argmax(rows[len(output.prompt_token_ids) - 1 :], axis=1).tolist() == list(output.token_ids)


def test_continuing_a_kept_prefix_changes_no_token(llm: LLM) -> None:
    first = llm.generate("def f(x):", SEEDED)[0]
    longer = [*first.prompt_token_ids, *first.token_ids, 7, 8]
    reused = llm.generate([longer], SEEDED)[0]
    assert reused.statistics.reused_tokens == len(longer) - 3
    llm.forget()
    fresh = llm.generate([longer], SEEDED)[0]
    assert fresh.statistics.reused_tokens == 0
    assert fresh.token_ids == reused.token_ids


def test_threads_and_tier_change_no_token(path: Path, llm: LLM) -> None:
    expected = llm.generate("def f(x):", SEEDED)[0].token_ids
    with LLM(path, threads=1, tier="generic") as other:
        output = other.generate("def f(x):", SEEDED)[0]
    assert output.token_ids == expected
    assert (output.statistics.tier, output.statistics.threads) == ("generic", 1)


def test_a_stream_and_a_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "def"}]
    text = "".join(piece.text for piece in llm.stream_chat(messages, SEEDED))
    assert text == llm.chat(messages, SEEDED)[0].text
    assert len(text) > 0


def test_twenty_requests_in_one_process_stay_right(llm: LLM) -> None:
    prompts = ["def", "def f", "return x", "def"]
    expected = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
    for _ in range(5):
        assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == expected


def test_a_cancelled_prompt_leaves_a_sound_model(llm: LLM) -> None:
    expected = llm.generate("def", GREEDY)[0].token_ids
    stream = llm.stream([5] * 1200, GREEDY, progress=lambda done, total: stream.cancel())
    assert [piece.finish_reason for piece in stream] == ["cancelled"]
    assert llm.generate("def", GREEDY)[0].token_ids == expected


def test_settings_are_checked_against_the_file(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean threads"):
        LLM(path, thread=2)
    with pytest.raises(ConfigError, match="beyond the 4096 tokens"):
        LLM(path, ctx_size=5000)
    with pytest.raises(ModelNotFoundError):
        LLM(tmp_path / "absent.gguf")


def test_the_configuration_of_an_open_model_is_concrete(llm: LLM) -> None:
    assert llm.opened.config == replace(llm.opened.config, threads=2, ctx_size=4096)


def test_tm05_without_a_template_completions_still_work(tmp_path: Path) -> None:
    model = make_model()
    del model.metadata["tokenizer.chat_template"]
    (path,) = write_model(tmp_path / "plain.gguf", model)
    with LLM(path, threads=1) as llm:
        assert not llm.opened.has_chat_template
        with pytest.raises(TemplateError, match="absent"):
            llm.chat([{"role": "user", "content": "def"}])
        assert len(llm.generate("def", GREEDY)[0].token_ids) == 12


def test_a_files_sampling_recommendations_are_the_defaults(tmp_path: Path) -> None:
    model = make_model()
    model.metadata |= {"general.sampling.temp": 0.0, "general.sampling.top_k": 20}
    (path,) = write_model(tmp_path / "recommends.gguf", model)
    with LLM(path, threads=1) as llm:
        assert llm.opened.default_sampling == SamplingParams(temperature=0.0, top_k=20)
    model.metadata["general.sampling.top_p"] = 2.0
    (path,) = write_model(tmp_path / "absurd.gguf", model)
    with (
        pytest.warns(UserWarning, match=r"general\.sampling\.top_p: top_p must be a number from 0 to 1"),
        LLM(path, threads=1) as llm,
    ):
        assert llm.opened.default_sampling == SamplingParams(temperature=0.0, top_k=20)


def test_statistics_say_how_often_experts_were_at_hand() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(demo_model_path(), device="cpu", ctx_size=64, ram="30M") as llm:
        (answer,) = llm.generate("import os", params)
        rate = answer.statistics.expert_hit_rate
        assert rate is not None
        assert 0 < rate < 1
    with LLM(demo_model_path(), device="cpu", ctx_size=64) as llm:
        (mapped,) = llm.generate("import os", params)
        assert mapped.statistics.expert_hit_rate is None
    assert mapped.token_ids == answer.token_ids
