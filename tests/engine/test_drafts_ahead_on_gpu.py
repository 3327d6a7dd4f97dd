"""Steps between drafts are launched before their tokens are known; answers, states and what drafters observe
are as without that. On the host.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from engine_clients import engine_of
from scripted_drafts import Scripted, check_same
from test_drafts_on_gpu import on_the_host, scripted

from builders import SMALL_EXPERTS, write_gguf
from coldstream import kvcache
from coldstream.decoding import SizeReason, Speculation, TokenTree, TriedDraft
from coldstream.decoding.fused_sizes import FixedFusedSizes, FusedSizes
from coldstream.engine import LLM, OpenedModel, SamplingParams, engine
from coldstream.engine.job_drafts import JobDrafts
from coldstream.engine.model_steps import LaunchedStep, launch_ahead
from coldstream.kvcache import Batch
from coldstream.models.runner import ModelRunner
from host_device import HostDevice
from host_gpu import gpu_on

PROMPT = [1, 2, 3, 1, 2]
SEEDED = SamplingParams(seed=3, max_tokens=13, ignore_eos=True)
PARAMS = {
    "greedy": replace(SEEDED, temperature=0.0),
    "seeded": SEEDED,
    "penalties": replace(SEEDED, frequency_penalty=0.7, repeat_last_n=3),
    "end tokens": replace(SEEDED, temperature=1.5, top_k=0, stop_token_ids=range(0, 300, 3)),
    "end token after some": replace(SEEDED, temperature=1.5, top_k=0, stop_token_ids=range(0, 300, 29)),
    "two tokens": replace(SEEDED, max_tokens=2),
}


def unchanged(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    """A processor, for which logits come to the host."""
    return logits


@dataclass
class EveryFourth:
    """Two nodes before every fourth step, none before others. `idle_steps`: those of a long rest."""

    idle_steps: Sequence[int] = ()
    num_steps: int = 0
    drafts_beside_prompts = True
    reason = SizeReason.FIXED

    @property
    def fused(self) -> FusedSizes:
        return FixedFusedSizes(0)

    def will_draft(self, most: int, num_sequences: int = 1) -> bool:
        """Of the next step, while the one before is under way."""
        return most > 0 and not self.is_idle() and self.num_steps % 4 == 2

    def budget(self, most: int, num_sequences: int = 1) -> int:
        return min(2, most) if not self.is_idle() and self.num_steps % 4 == 3 else 0

    def is_idle(self, num_sequences: int = 1) -> bool:
        return self.num_steps in self.idle_steps

    def sizes(self, trees: Sequence[TokenTree], draft_s: float) -> list[int]:
        return [len(tree) for tree in trees]

    def record(self, drafts: Sequence[TriedDraft], seconds: float, *, is_usual: bool = True) -> None:
        self.num_steps += 1


@dataclass
class Noting(Scripted):
    """Keeps what it observes: tokens, −1 for those that it did not observe, and the state of each."""

    states: list[Any] = field(default_factory=list)

    def truncate(self, length: int) -> None:
        assert length == 0 or length >= len(self.token_ids), "no row was observed that is not held"
        self.token_ids = [*self.token_ids[:length], *[-1] * (length - len(self.token_ids))]
        self.states = [*self.states[:length], *[None] * (length - len(self.states))]

    def extend(self, token_ids: Sequence[int], hidden: Any) -> None:
        super().extend(token_ids, hidden)
        self.states += [None] * len(token_ids) if hidden is None else list(np.array(hidden))

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        assert len(self.token_ids) == len(context) - 1
        assert all(known in (-1, id_) for known, id_ in zip(self.token_ids, context, strict=False))
        return self.drafted(context, budget)


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, compiled_for_the_host: HostDevice
) -> Iterator[tuple[LLM, OpenedModel]]:
    """The model with all experts and without drafts, and with half of them in slots and with drafts."""
    (path,) = write_gguf(
        tmp_path_factory.mktemp("ahead") / "tiny.gguf",
        "qwen35moe",
        dims=SMALL_EXPERTS,
        nextn=True,
        quant="Q8_0",
    )
    with (
        gpu_on(compiled_for_the_host),
        on_the_host(path, has_mtp=False) as plain,
        on_the_host(path, has_mtp=True, share=0.5) as opened,
    ):
        yield LLM.from_opened(plain), opened


@cache
def knowing(plain: LLM, params: SamplingParams) -> Scripted:
    """What is drafted of, which is asked once for each of `params`."""
    num_tokens = params.max_tokens + 4  # behind the last token of an answer drafts go on
    return scripted("right", plain, [PROMPT], params, wants_hidden=True, num_tokens=num_tokens)


def noting(plain: LLM, params: SamplingParams, *, kind: str = "right", wants_hidden: bool = True) -> Noting:
    found = knowing(plain, params)
    return Noting(kind, found.answers, found.vocab_size, found.end_id, wants_hidden=wants_hidden)


@pytest.mark.sharded(6)
@pytest.mark.parametrize("name", PARAMS)
def test_answers_and_the_states_that_they_leave_are_those_without_drafts(
    models: tuple[LLM, OpenedModel], name: str
) -> None:
    plain, opened = models
    params, kind = PARAMS[name], "random" if name == "seeded" else "right"
    llm = LLM.from_opened(
        replace(opened, speculation=Speculation(noting(plain, params, kind=kind), EveryFourth()))
    )
    prompt = PROMPT
    for _ in range(2):
        (expected,), (found,) = plain.generate([prompt], params), llm.generate([prompt], params)
        check_same(expected, found)
        assert found.statistics.reused_tokens == expected.statistics.reused_tokens
        prompt = [*prompt, *found.token_ids, 7]
    llm.forget()
    plain.forget()


@pytest.mark.sharded(of="models on a GPU")
def test_experts_of_drafts_are_those_that_their_steps_used(
    models: tuple[LLM, OpenedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps launched ahead and the prompt are not counted."""
    plain, opened = models
    step, commit = opened.runner.step, opened.runner.commit
    before, after = [], []

    def noted(batch: Batch) -> tuple[Any, ...]:
        if batch.segments[0].parents is not None:
            before.append(np.array(opened.runner.expert_uses))
        return step(batch)

    def noted_commit(sequence: kvcache.Sequence, rows: Sequence[int]) -> None:
        commit(sequence, rows)
        after.append(np.array(opened.runner.expert_uses))

    monkeypatch.setattr(opened.runner, "step", noted)
    monkeypatch.setattr(opened.runner, "commit", noted_commit)
    speculation = Speculation(noting(plain, SEEDED), EveryFourth())
    llm = LLM.from_opened(replace(opened, speculation=speculation))
    found = llm.generate([PROMPT], SEEDED)[0].statistics.speculation
    hits, misses = sum(one - other for one, other in zip(after, before, strict=True))
    assert found.drafted_steps == len(before) > 1
    assert (found.experts, found.cold_experts) == (hits + misses, misses)
    spec = opened.runner.spec
    assert found.experts >= found.drafted_steps * spec.num_layers * spec.num_experts_per_tok
    llm.forget()


@pytest.mark.sharded
@pytest.mark.parametrize(("wants_hidden", "idle_steps"), [(True, ()), (False, ()), (True, (4,))])
def test_drafters_observe_each_step_once_with_its_own_states(
    models: tuple[LLM, OpenedModel],
    monkeypatch: pytest.MonkeyPatch,
    wants_hidden: bool,
    idle_steps: Sequence[int],
) -> None:
    """As where the host chooses, which it does if logits are processed there."""
    plain, opened = models
    drafters, num_launched = [], []
    launched: list[LaunchedStep] = []

    def noted(runner: ModelRunner, before: LaunchedStep) -> LaunchedStep:
        launched.append(launch_ahead(runner, before))
        return launched[-1]

    monkeypatch.setattr(engine, "launch_ahead", noted)
    for params in (SEEDED, replace(SEEDED, logits_processors=[unchanged])):
        drafter = noting(plain, SEEDED, wants_hidden=wants_hidden)
        llm = LLM.from_opened(
            replace(opened, speculation=Speculation(drafter, EveryFourth(idle_steps=idle_steps)))
        )
        launched.clear()
        (answer,) = llm.generate([PROMPT], params)
        num_launched.append(len(launched))
        drafters.append((list(drafter.token_ids), list(drafter.states)))
        llm.forget()
    (ahead_ids, ahead_states), (ids, states) = drafters
    assert num_launched[0] > 0 == num_launched[1]
    assert len(ahead_ids) == len(ids) == len(PROMPT) + len(answer.token_ids) - 1
    assert (min(*ids, *ahead_ids) < 0) == bool(idle_steps)
    both = [at for at, pair in enumerate(zip(ahead_ids, ids, strict=True)) if min(pair) >= 0]
    assert len(both) >= len(ids) - 2 * len(idle_steps)
    for at in both:
        assert ahead_ids[at] == ids[at]
        np.testing.assert_array_equal(ahead_states[at], states[at])


@pytest.mark.sharded
@pytest.mark.parametrize(
    ("name", "wants_hidden", "idle_steps"),
    [
        ("seeded", True, ()),
        ("seeded", False, ()),
        ("seeded", True, (4,)),
        ("penalties", True, ()),
        ("end token after some", True, ()),
    ],
)
def test_an_engine_launches_steps_ahead_between_drafts_and_tells_of_each_once(
    models: tuple[LLM, OpenedModel], name: str, wants_hidden: bool, idle_steps: Sequence[int]
) -> None:
    """As where the host chooses, which it does if logits are processed there."""
    plain, opened = models
    drafters, num_ahead = [], []
    for params in (PARAMS[name], replace(PARAMS[name], logits_processors=[unchanged])):
        drafter = noting(plain, PARAMS[name], wants_hidden=wants_hidden)
        speculation = Speculation(drafter, EveryFourth(idle_steps=idle_steps))
        with engine_of(replace(opened, speculation=speculation)) as client:
            asked = client.add(PROMPT, params)
            client.drain()
            tokens = client.tokens_so_far(asked)
            num_ahead.append(client.engine.statistics().ahead_steps)
            drafters.append((list(drafter.token_ids), list(drafter.states)))
        assert tokens == list(plain.generate([PROMPT], params)[0].token_ids)
    (ahead_ids, ahead_states), (ids, states) = drafters
    assert num_ahead[0] > 2
    assert num_ahead[1] == 0
    num_known = len(PROMPT) + len(tokens) - 1
    assert num_known - 1 <= min(len(ahead_ids), len(ids)) <= max(len(ahead_ids), len(ids)) <= num_known
    both = [at for at, pair in enumerate(zip(ahead_ids, ids, strict=False)) if min(pair) >= 0]
    assert len(both) >= num_known - 1 - 2 * len(idle_steps)
    for at in both:
        assert ahead_ids[at] == ids[at]
        np.testing.assert_array_equal(ahead_states[at], states[at])


def test_a_drafter_does_not_observe_a_step_behind_an_end_token(
    models: tuple[LLM, OpenedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which was launched before it was known that the answer ends."""
    plain, opened = models
    taken_back = []
    take_back = opened.runner.take_back
    monkeypatch.setattr(
        opened.runner, "take_back", lambda sequence: (taken_back.append(sequence), take_back(sequence))
    )
    for seed in range(5):
        params = replace(PARAMS["end tokens"], seed=seed, stop_token_ids=range(0, 300, 7))
        drafter = noting(plain, params)
        with engine_of(replace(opened, speculation=Speculation(drafter, EveryFourth()))) as client:
            asked = client.add(PROMPT, params)
            client.drain()
            known = [*PROMPT, *client.tokens_so_far(asked)]
            assert drafter.token_ids == known[: len(drafter.token_ids)]
            assert len(drafter.states) == len(drafter.token_ids)
    assert taken_back, "or this would see nothing"


def test_where_a_device_drafts_by_itself_no_step_is_launched_ahead_of_it(
    models: tuple[LLM, OpenedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once an answer is alone it goes on in fused steps, whose sizes say when nothing is drafted."""
    plain, opened = models
    found = []
    for idle_steps, has_fused in (((), False), ((), True), ((0,), True)):
        monkeypatch.setattr(JobDrafts, "has_fused", has_fused)
        speculation = Speculation(noting(plain, SEEDED), EveryFourth(idle_steps=idle_steps))
        found.append(JobDrafts(opened.runner, speculation).will_draft(1))
    assert found == [False, True, False]
