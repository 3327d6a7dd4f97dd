"""FL03: an `LLM` whose model file is written to in use gives out no token more, and tells every request."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coldstream import LLM, SamplingParams
from coldstream.assets import demo_model_path
from coldstream.errors import ModelChangedError
from file_changes import overwrite_experts

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "def"}]
WRITTEN = r"demo\.gguf was written to while in use, .* load the model again"

REQUESTS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate("def f(x):", GREEDY),
    "stream": lambda llm: next(llm.stream("def f(x):", GREEDY)),
    "chat": lambda llm: llm.chat(MESSAGES, GREEDY),
    "stream_chat": lambda llm: next(llm.stream_chat(MESSAGES, GREEDY)),
    "logits": lambda llm: llm.logits([1, 2, 3]),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(demo_model_path(), tmp_path / "demo.gguf"))


@pytest.fixture(params=["mapped", "ram"])
def llm(path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    options = {"ram": "24M"} if request.param == "ram" else {}
    with LLM(path, device="cpu", threads=2, ctx_size=256, **options) as llm:
        assert (llm.opened.runner.disk is not None) == (request.param == "ram")
        yield llm


@pytest.mark.parametrize("keeps_time", [False, True], ids=["", "time-put-back"])
def test_every_kind_of_request_is_refused(llm: LLM, path: Path, keeps_time: bool) -> None:
    llm.generate("def f(x):", GREEDY)
    overwrite_experts(path, keeps_time=keeps_time)
    for request in (*REQUESTS.values(), *REQUESTS.values()):
        with pytest.raises(ModelChangedError, match=WRITTEN):
            request(llm)


def test_a_stream_ends_with_the_error_and_no_token_more(llm: LLM, path: Path) -> None:
    expected = llm.generate("def f(x):", GREEDY)[0].token_ids
    stream = llm.stream("def f(x):", GREEDY)
    token_ids = [next(stream).token_ids[0] for _ in range(3)]
    overwrite_experts(path)
    with pytest.raises(ModelChangedError, match=WRITTEN):
        next(stream)
    assert tuple(token_ids) == expected[:3]
    with pytest.raises(StopIteration):
        next(stream)
    with pytest.raises(ModelChangedError, match=WRITTEN):
        llm.generate("def f(x):", GREEDY)
    llm.forget()
    assert llm.opened.runner.free == llm.opened.runner.cache_size
