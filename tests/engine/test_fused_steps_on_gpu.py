"""Answers whose steps a device drafts and accepts by itself are those without drafts, and so is what they
leave; on the host too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from engine_clients import alone, engine_of
from scripted_drafts import KINDS, Scripted, check_same
from test_drafts_on_gpu import CONTEXT, open_runner, scripted

from bench.engine.scripted_fused_steps import script_fused_steps
from builders import SMALL_EXPERTS, write_gguf
from coldstream.assets import demo_model_path
from coldstream.decoding import FixedSizes, SizesByCost, Speculation
from coldstream.decoding.drafters import MtpDrafter
from coldstream.decoding.fused_sizes import FixedFusedSizes
from coldstream.decoding.speculation import TreeSizes
from coldstream.engine import LLM, SamplingParams, fused_steps
from coldstream.engine.opened_model import OpenedModel
from coldstream.kernels.cuda.contents import CudaArray
from coldstream.kernels.fused.reference import FusedResult
from hash_runner import opened_with
from host_device import HostDevice
from host_gpu import gpu_on

DEPTHS = 63
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=3)
PROMPTS = ["def add(a, b):\n", "import os\nimport sys\n\n\ndef main() -> None:\n    ", "class Shape:"]


@dataclass
class Models:
    """The same model without drafts, and with a block whose drafts are written beforehand."""

    plain: LLM
    drafting: LLM
    script: CudaArray

    def opened(self, num_nodes: int) -> OpenedModel:
        """With drafts of so many tokens."""
        speculation = self.drafting.opened.speculation
        assert speculation is not None
        return replace(
            self.drafting.opened, speculation=Speculation(speculation.drafter, FixedSizes(num_nodes))
        )

    def sized(self, num_nodes: int) -> LLM:
        return LLM.from_opened(self.opened(num_nodes))

    def write(self, drafter: Scripted, answers: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        """The drafts of `drafter` after each token of these texts, the last of which counts."""
        rows = np.full((len(self.script), DEPTHS), drafter.vocab_size - 1, np.int32)
        for prompt, answer in answers.items():
            text = [*prompt, *answer]
            for length in range(len(prompt) + 1, len(text) + 1):
                tree = drafter.drafted(text[:length], DEPTHS)
                rows[length - 1, : len(tree)] = tree.token_ids
        self.script[:] = rows


def known(params: SamplingParams) -> int:
    """Tokens of an answer that are known to who drafts it: drafts go on behind its end."""
    return (params.max_tokens or 0) + 16


@contextmanager
def models_of(path: Path) -> Iterator[Models]:
    with (
        open_runner(path, share=None, has_mtp=False) as one,
        open_runner(path, share=None, has_mtp=True) as two,
    ):
        block = two.load_mtp()
        script = script_fused_steps(block, CONTEXT, DEPTHS)
        speculation = Speculation(MtpDrafter(block.new_sequence()), FixedSizes(3))
        plain, opened = LLM.from_opened(opened_with(one, CONTEXT)), opened_with(two, CONTEXT)
        yield Models(plain, LLM.from_opened(replace(opened, speculation=speculation)), script)


def check_texts(
    models: Models, kind: str, prompts: Sequence[Any], params: SamplingParams, num_nodes: int
) -> float:
    """Tokens a fused step over all prompts; the last answer is continued from what it left."""
    drafter, llm, steps = (
        scripted(kind, models.plain, prompts, params, wants_hidden=True, num_tokens=known(params)),
        models.sized(num_nodes),
        [],
    )
    for prompt in prompts:
        (expected,) = models.plain.generate(prompt, params)
        models.write(drafter, {expected.prompt_token_ids: drafter.answers[expected.prompt_token_ids]})
        (found,) = llm.generate(prompt, params)
        check_same(expected, found)
        statistics = found.statistics.speculation
        assert statistics.fused_steps == statistics.steps > 0
        steps.append(statistics.tokens_per_step)
    longer = [*found.prompt_token_ids, *found.token_ids, 5, 6]
    (expected,), (found,) = models.plain.generate(longer, params), llm.generate(longer, params)
    check_same(expected, found)
    assert found.statistics.reused_tokens == expected.statistics.reused_tokens > 0
    llm.forget()
    models.plain.forget()
    return sum(steps) / len(steps)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fused")
    return write_gguf(folder / "tiny.gguf", "qwen35moe", dims=SMALL_EXPERTS, nextn=True, quant="Q8_0")[0]


@pytest.fixture(scope="module")
def models(path: Path, compiled_for_the_host: HostDevice) -> Iterator[Models]:
    with gpu_on(compiled_for_the_host), models_of(path) as models:
        yield models


@pytest.mark.sharded
@pytest.mark.parametrize(
    ("kind", "params", "num_nodes"), [("right", GREEDY, 3), ("mostly_right", SEEDED, 2), ("wrong", GREEDY, 1)]
)
def test_fused_steps_on_the_host(models: Models, kind: str, params: SamplingParams, num_nodes: int) -> None:
    tokens = check_texts(models, kind, [[1, 2, 3, 1, 2]], params, num_nodes)
    assert kind == "wrong" or tokens > 1.2


def test_an_answer_ends_where_the_plain_one_does(models: Models) -> None:
    """With an end token in the middle of a draft, and where the caller leaves."""
    prompt = [1, 2, 3]
    (plain,) = models.plain.generate(prompt, GREEDY)
    drafter = Scripted("right", {tuple(prompt): plain.token_ids}, 300, wants_hidden=True)
    models.write(drafter, drafter.answers)
    llm = models.sized(3)
    params = replace(GREEDY, stop_token_ids=[plain.token_ids[2]])
    (expected,), (found,) = models.plain.generate(prompt, params), llm.generate(prompt, params)
    check_same(expected, found)
    text = plain.outputs[0].text
    stopped = replace(GREEDY, stop=[text[len(text) // 2]])
    (expected,), (found,) = models.plain.generate(prompt, stopped), llm.generate(prompt, stopped)
    check_same(expected, found)
    longer = [*prompt, *found.token_ids, 6]
    (expected,), (found,) = models.plain.generate(longer, GREEDY), llm.generate(longer, GREEDY)
    check_same(expected, found)
    assert found.statistics.reused_tokens == len(longer) - 2
    for num_taken in (1, 3):
        models.plain.forget()
        llm.forget()
        with llm.stream(prompt, GREEDY) as stream:
            taken = [token_id for _ in range(num_taken) for token_id in next(stream).token_ids]
        assert tuple(taken) == plain.token_ids[:num_taken]
        longer = [*prompt, *taken, 6]
        once = replace(GREEDY, max_tokens=2)
        (expected,), (found,) = models.plain.generate(longer, once), llm.generate(longer, once)
        check_same(expected, found)
    llm.forget()
    models.plain.forget()


def check_engine(models: Models, prompt: list[int], params: SamplingParams) -> None:
    """An answer that is alone at first and in the end, and beside another in between."""
    drafter = scripted(
        "mostly_right", models.plain, [prompt], params, wants_hidden=True, num_tokens=known(params)
    )
    models.write(drafter, drafter.answers)
    wanted = alone(models.plain, prompt, params)
    other, short = [4, 5], replace(params, max_tokens=3)
    wanted_of_other = alone(models.plain, other, short)
    with engine_of(models.opened(3)) as client:
        first = client.add(prompt, params)
        while len(client.tokens_so_far(first)) < 4:
            client.step()
        assert not client.is_over(first)
        second = client.add(other, short)
        while not client.tokens_so_far(second):
            client.step()
        assert not client.is_over(first), "fused steps end where another answer waits"
        client.drain()
        assert (client.answers(first), client.answers(second)) == (wanted, wanted_of_other)
        statistics = client.outputs(first)[0].statistics
        assert statistics is not None
        assert statistics.speculation is not None
        assert 1 < statistics.speculation.fused_steps < len(wanted[0][1])  # type: ignore[arg-type]
        counts = client.engine.statistics()
        assert counts.drafts >= statistics.speculation.fused_steps - 2
        assert counts.accepted_tokens == statistics.speculation.accepted
        again = client.add([*prompt, *client.tokens_so_far(first), 6], short)
        client.drain()
        longer = alone(models.plain, [*prompt, *client.tokens_so_far(first), 6], short)
        assert client.answers(again) == longer


def test_an_engine_drafts_an_answer_that_is_alone(models: Models) -> None:
    check_engine(models, [1, 2, 3, 1], replace(SEEDED, max_tokens=14))


def check_sizes(models: Models, sizes: TreeSizes, prompts: Sequence[Any], params: SamplingParams) -> None:
    """Fused steps of changing sizes, none among them."""
    speculation = models.drafting.opened.speculation
    assert speculation is not None
    speculation = Speculation(speculation.drafter, sizes)
    llm = LLM.from_opened(replace(models.drafting.opened, speculation=speculation))
    drafter = scripted(
        "mostly_right", models.plain, prompts, params, wants_hidden=True, num_tokens=known(params)
    )
    for prompt in prompts:
        (expected,) = models.plain.generate(prompt, params)
        models.write(drafter, {expected.prompt_token_ids: drafter.answers[expected.prompt_token_ids]})
        (found,) = llm.generate(prompt, params)
        check_same(expected, found)
        assert found.statistics.speculation.fused_steps == found.statistics.speculation.steps > 0
    llm.forget()


class InTurn(FixedFusedSizes):
    """Fused steps of one token, of most and of none, in turn."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        object.__setattr__(self, "turns", cycle((1, most, 0)))

    def next(self) -> int:
        return next(self.turns)


class SizesInTurn(FixedSizes):
    @property
    def fused(self) -> InTurn:
        return InTurn(self.num_nodes)


@pytest.mark.sharded(of="models on a GPU")
def test_fused_steps_of_changing_sizes_leave_the_answers(models: Models) -> None:
    check_sizes(models, SizesInTurn(3), [[1, 2, 3, 1, 2]], replace(SEEDED, max_tokens=9))


class BackingOff(FixedFusedSizes):
    """Two fused steps, then three plain ones. The drafter observes the last of them."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        object.__setattr__(self, "observed", [])

    @property
    def place(self) -> int:
        return sum(self.observed) % 5

    def backs_off(self) -> bool:
        return self.place >= 2

    def is_idle(self) -> bool:
        return 2 <= self.place < 4

    def record(self, accepted: FusedResult, seconds: float, *, is_usual: bool = True) -> None:
        self.observed.append(1)

    def went_on(self, num_steps: int, seconds: float, *, is_usual: bool = True) -> None:
        self.observed.append(num_steps)


class BackingOffSizes(FixedSizes):
    @property
    def fused(self) -> BackingOff:
        return BackingOff(self.num_nodes)


def check_backoff(models: Models, prompt: Any, params: SamplingParams) -> None:
    """Alone, and served."""
    speculation = models.drafting.opened.speculation
    assert speculation is not None
    backing_off = Speculation(speculation.drafter, BackingOffSizes(1))
    opened = replace(models.drafting.opened, speculation=backing_off)
    (expected,) = models.plain.generate(prompt, params)
    drafter = scripted(
        "mostly_right", models.plain, [prompt], params, wants_hidden=True, num_tokens=known(params)
    )
    models.write(drafter, {expected.prompt_token_ids: drafter.answers[expected.prompt_token_ids]})
    llm = LLM.from_opened(opened)
    (found,) = llm.generate(prompt, params)
    check_same(expected, found)
    once = found.statistics.speculation
    assert 2 < once.fused_steps < once.steps - 2
    llm.forget()
    wanted = alone(models.plain, prompt, params)
    with engine_of(opened) as client:
        first = client.add(prompt, params)
        client.drain()
        assert client.answers(first) == wanted
        statistics = client.outputs(first)[0].statistics
        assert statistics is not None
        assert statistics.speculation is not None
        assert 2 < statistics.speculation.fused_steps < statistics.speculation.steps - 2


def test_fused_steps_that_back_off_leave_the_answers(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_steps, "MOST_TOKENS", 4)
    for params in (replace(GREEDY, max_tokens=14, seed=1), replace(SEEDED, max_tokens=14)):
        check_backoff(models, [1, 2, 3, 1, 2], params)


@pytest.fixture(scope="module")
def demo() -> Iterator[Models]:
    with models_of(demo_model_path()) as models:
        yield models


PARAMS = [
    replace(GREEDY, max_tokens=32, ignore_eos=False),
    replace(SEEDED, max_tokens=32, ignore_eos=False),
    replace(GREEDY, max_tokens=32, stop=["return", "\n\n"], ignore_eos=False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded", "stops"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_draft_of_a_fused_step_leaves_the_answers(
    demo: Models, kind: str, params: SamplingParams
) -> None:
    num_nodes = (1, 2, 3, 7, 8, 15, 16, 22, 63)[(KINDS.index(kind) + PARAMS.index(params)) % 9]
    check_texts(demo, kind, PROMPTS, params, num_nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded", "stops"])
def test_fused_sizes_by_cost_leave_the_answers(demo: Models, params: SamplingParams) -> None:
    for _ in range(4):
        check_sizes(demo, SizesByCost("mtp"), PROMPTS, params)
    check_sizes(demo, SizesInTurn(5), PROMPTS, params)


@pytest.mark.gpu
@pytest.mark.parametrize("params", PARAMS[:2], ids=["greedy", "seeded"])
def test_fused_steps_that_back_off_leave_the_answers_on_a_gpu(demo: Models, params: SamplingParams) -> None:
    (prompt,) = {output.prompt_token_ids for output in demo.plain.generate(PROMPTS[:1], params)}
    check_backoff(demo, list(prompt), replace(params, max_tokens=40, seed=3, ignore_eos=True))


@pytest.mark.gpu
@pytest.mark.parametrize("params", PARAMS[:2], ids=["greedy", "seeded"])  # long enough for the other one
def test_an_engine_on_a_gpu_drafts_an_answer_that_is_alone(demo: Models, params: SamplingParams) -> None:
    (prompt,) = {output.prompt_token_ids for output in demo.plain.generate(PROMPTS[:1], params)}
    check_engine(demo, list(prompt), replace(params, seed=3))
