"""Drafts for several answers at once: a drafter and a tree for each, one step for all, and the tokens of each
as if it were alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import count, cycle
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import test_engine_core
from engine_clients import Answer, Client, alone, engine_of, rows_of_steps
from scripted_drafts import BUDGETS, KINDS
from test_engine_core import ROOMY, SAMPLED, mixed_wishes

from builders import write_gguf
from coldstream import kvcache
from coldstream.decoding import FixedSizes, Logits, SizesByCost, Speculation, TokenTree, TriedDraft
from coldstream.engine import LLM, OpenedModel, SamplingParams
from coldstream.errors import InvalidRequestError
from coldstream.kvcache import CacheSize
from tests.audits.draft_kinds import DRAFTS, Drafting

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=1)
TREE_ROWS = 64


@dataclass
class Oracle:
    """A drafter that knows whole texts, and checks that it observes the sequence that it drafts for."""

    kind: str
    texts: Sequence[Sequence[int]]
    vocab_size: int
    wants_hidden: bool = False
    aux_layers: tuple[int, ...] = ()
    name: str = "oracle"

    def __post_init__(self) -> None:
        self.observed: list[int] = []  # −1 where it did not observe
        self.num_asked = 0
        self.hidden: dict[tuple[int, ...], bytes] = {}  # after these tokens

    def truncate(self, length: int) -> None:
        self.observed = [*self.observed, *[-1] * length][:length]

    def extend(self, token_ids: Sequence[int], hidden: Any) -> None:
        assert (hidden is not None) == self.wants_hidden
        assert hidden is None or len(hidden) == len(token_ids)
        for i, token_id in enumerate(token_ids):
            self.observed.append(token_id)
            if hidden is not None:
                self.hidden[tuple(self.observed)] = hidden[i].tobytes()

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        self.num_asked += 1
        assert len(self.observed) + 1 == len(context)
        assert all(mine in (-1, token) for mine, token in zip(self.observed, context, strict=False))
        known = (text[len(context) :] for text in self.texts if list(text[: len(context)]) == list(context))
        following = tuple(next(known, ()))
        return DRAFTS[self.kind](Drafting(context, following, self.vocab_size, end_id=0), budget)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("drafts") / "tiny.gguf")[0]


def opened_model(path: Path, size: CacheSize = ROOMY) -> AbstractContextManager[OpenedModel]:
    return test_engine_core.opened_model(path, replace(size, num_tree_rows=TREE_ROWS))


@pytest.fixture
def opened(path: Path) -> Iterator[OpenedModel]:
    with opened_model(path) as opened:
        yield opened


def drafting(
    opened: OpenedModel, new: Callable[[], Any], sizes: FixedSizes | SizesByCost, *, is_one: bool = False
) -> OpenedModel:
    return replace(opened, speculation=Speculation(new(), sizes, None if is_one else new))


def texts_of(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Answer]]) -> list[list[int]]:
    """Each prompt with each of its answers."""
    return [
        [*prompt, *answer[1]]  # type: ignore[misc]
        for prompt, own in zip(prompts, answers, strict=True)
        for answer in own
    ]


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[list[Answer]]:
    """What each of `mixed_wishes(32)` gets alone and without drafts."""
    with opened_model(path) as opened:
        return [alone(LLM.from_opened(opened), *wish) for wish in mixed_wishes(32)]


@pytest.mark.sharded(9)
@pytest.mark.parametrize("num_nodes", BUDGETS)
@pytest.mark.parametrize("size", [ROOMY, CacheSize(num_blocks=4, num_states=3)], ids=["roomy", "tight"])
def test_sp08_32_concurrent_requests_with_drafts_are_each_what_they_are_alone(
    path: Path, size: CacheSize, num_nodes: int, wanted: list[list[Answer]]
) -> None:
    """Drafts of all kinds, right and wrong; some neighbours are cancelled."""
    random, kinds, wishes = Random(num_nodes), cycle(KINDS), mixed_wishes(32)
    texts = texts_of([prompt for prompt, _ in wishes], wanted)
    with opened_model(path, size) as plain:
        vocab_size = plain.runner.spec.vocab_size
        opened = drafting(plain, lambda: Oracle(next(kinds), texts, vocab_size), FixedSizes(num_nodes))
        with engine_of(opened) as client:
            ids, doomed = {}, []
            for number, (prompt, params) in enumerate(wishes):
                ids[number] = client.add(prompt, params, boundaries=(len(prompt) // 2,) if prompt[2:] else ())
                if random.random() < 0.3:
                    doomed.append(client.add(random.choice(wishes)[0], SAMPLED))
                for _ in range(random.randrange(3)):
                    client.step()
                if doomed and random.random() < 0.5:
                    client.engine.cancel(doomed.pop())
            client.drain()
            for number, request_id in ids.items():
                assert client.answers(request_id) == wanted[number]
            statistics = client.engine.statistics()
            assert statistics.accepted_tokens > 0
            assert statistics.drafted_tokens >= statistics.accepted_tokens


def add_all(client: Client, num: int, params: SamplingParams = GREEDY) -> list[int]:
    return [client.add([each, 7, 9], params) for each in range(num)]


def right_texts(opened: OpenedModel, num: int, params: SamplingParams = GREEDY) -> list[list[int]]:
    prompts = [[each, 7, 9] for each in range(num)]
    return texts_of(prompts, [alone(LLM.from_opened(opened), prompt, params) for prompt in prompts])


@pytest.mark.parametrize("num", [1, 2, 3, 5, 8, 30])
def test_a_trees_budget_shrinks_as_requests_share_the_step(opened: OpenedModel, num: int) -> None:
    texts = right_texts(opened, num)
    drafted = drafting(opened, lambda: Oracle("right", texts, opened.runner.spec.vocab_size), FixedSizes(20))
    with engine_of(drafted) as client:
        steps = rows_of_steps(opened.runner)
        ids = add_all(client, num)
        client.drain()
        assert [client.tokens_so_far(each) for each in ids] == [text[3:] for text in texts]
        together = [step for step in steps if len(step) == num][1:]  # after the prompts
        assert max(map(max, together)) == 1 + min(20, TREE_ROWS // num - 1)
        assert all(sum(step) <= TREE_ROWS for step in together)
        statistics = client.engine.statistics()
        assert statistics.computed_rows == sum(map(sum, steps))
        assert statistics.steps == len(steps)
        for each in ids:
            speculation = client.outputs(each)[0].statistics.speculation
            assert speculation is not None
            assert speculation.steps + speculation.accepted == len(client.tokens_so_far(each)) - 1


@pytest.mark.parametrize("kind", ["right", "mostly_right", "random"])
def test_each_drafter_observes_the_states_of_its_own_rows(opened: OpenedModel, kind: str) -> None:
    texts = right_texts(opened, 4)
    made: list[Oracle] = []

    def new() -> Oracle:
        made.append(Oracle(kind, texts, opened.runner.spec.vocab_size, wants_hidden=True))
        return made[-1]

    observed: list[dict[tuple[int, ...], bytes]] = []
    for at_once in (1, 4):
        made.clear()
        with engine_of(drafting(opened, new, FixedSizes(5))) as client:
            for i in range(4):
                client.add([i, 7, 9], GREEDY)
                if at_once == 1 or i == 2:  # the last one comes while the others decode
                    client.drain() if at_once == 1 else client.step()
            client.drain()
        observed.append({key: value for each in made for key, value in each.hidden.items()})
    assert observed[0] == observed[1]
    assert len(observed[0]) >= sum(map(len, texts)) - len(texts)


class Recorded(FixedSizes):
    """Keeps what came of drafts."""

    tried: ClassVar[list[Sequence[TriedDraft]]] = []
    usual: ClassVar[list[bool]] = []

    def record(self, drafts: Sequence[TriedDraft], seconds: float, *, is_usual: bool = True) -> None:
        assert seconds > 0
        self.tried.append(drafts)
        self.usual.append(is_usual)


class Moody(Oracle):
    """Drafts in every second step only."""

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        tree = super().propose(context, budget)
        return tree if self.num_asked % 2 else TokenTree()


def test_what_came_of_drafts_is_learned_once(opened: OpenedModel) -> None:
    texts = right_texts(opened, 3)
    Recorded.tried.clear()
    drafted = drafting(opened, lambda: Moody("right", texts, opened.runner.spec.vocab_size), Recorded(3))
    with engine_of(drafted) as client:
        add_all(client, 3)
        client.drain()
        statistics = client.engine.statistics()
    tried = [draft for step in Recorded.tried for draft in step]
    assert sum(len(draft.tree) for draft in tried) == statistics.drafted_tokens
    assert sum(len(draft.accepted) for draft in tried) == statistics.accepted_tokens > 0
    assert any(len(draft.tree) == 0 for draft in tried)
    assert [len(step) for step in Recorded.tried] == [3] * len(Recorded.tried)


def test_steps_in_which_a_device_made_what_others_use_are_marked_so(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Capturing(Oracle):
        def propose(self, context: Sequence[int], budget: int) -> TokenTree:
            captured.append(len(context) < len(texts[0]) - 3)
            return super().propose(context, budget)

    captured: list[bool] = []
    texts = right_texts(opened, 1)
    monkeypatch.setattr(type(opened.runner), "num_captured", property(lambda _: sum(captured)))
    Recorded.usual.clear()
    drafted = drafting(opened, lambda: Capturing("wrong", texts, opened.runner.spec.vocab_size), Recorded(2))
    with engine_of(drafted) as client:
        add_all(client, 1)
        client.drain()
    assert captured[0]
    assert not captured[-1]
    assert Recorded.usual[: len(captured)] == [not each for each in captured]


def test_more_answers_than_have_room_for_a_node_decode_plainly(opened: OpenedModel) -> None:
    """The 40th makes one too many for 64 rows of trees; once some are over the others have drafts."""
    lengths = [8] * 20 + [16] * 20
    asked: list[Oracle] = []

    def new() -> Oracle:
        asked.append(Oracle("random", [], opened.runner.spec.vocab_size))
        return asked[-1]

    with engine_of(drafting(opened, new, FixedSizes(3))) as client:
        steps = rows_of_steps(opened.runner)
        for i, length in enumerate(lengths):
            client.add([i, 7, 9], replace(GREEDY, max_tokens=length))
        client.drain()
        assert all(max(step) == 1 for step in steps if len(step) == 40 and sum(step) < 80)
        assert any(max(step) > 1 for step in steps if len(step) == 20)
        assert len(asked) <= 20 + 1


def test_only_an_answer_that_is_alone_has_drafts_of_a_drafter_that_there_is_once(opened: OpenedModel) -> None:
    texts = right_texts(opened, 2)
    drafter = Oracle("right", texts, opened.runner.spec.vocab_size)
    with engine_of(drafting(opened, lambda: drafter, FixedSizes(2), is_one=True)) as client:
        steps = rows_of_steps(opened.runner)
        first = client.add([0, 7, 9], GREEDY)
        for _ in range(3):
            client.step()
        second = client.add([1, 7, 9], replace(GREEDY, max_tokens=5))
        client.drain()
        assert [client.tokens_so_far(each) for each in (first, second)] == [texts[0][3:], texts[1][3:8]]
        assert steps == [[3], [3], [3], [1, 3], *[[1, 1]] * 4, *[[3]] * 4]


class Costly(FixedSizes):
    """Sizes of which nothing is known beside prompts."""

    drafts_beside_prompts = False


@pytest.mark.parametrize("by_cost", [False, True])
def test_a_fixed_draft_goes_beside_a_prompt_and_one_by_cost_does_not(
    opened: OpenedModel, by_cost: bool
) -> None:
    texts = right_texts(opened, 1)
    sizes = Costly(2) if by_cost else FixedSizes(2)
    drafted = drafting(opened, lambda: Oracle("right", texts, opened.runner.spec.vocab_size), sizes)
    with engine_of(drafted) as client:
        first = client.add([0, 7, 9], GREEDY)
        client.step()
        steps = rows_of_steps(opened.runner)
        client.add(list(range(9)), GREEDY)
        client.step()
        assert steps == [[1 if by_cost else 3, 9]]
        client.drain()
        assert client.tokens_so_far(first) == texts[0][3:]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_error_along_one_tree_leaves_the_others(
    opened: OpenedModel, error: type[BaseException], at: int
) -> None:
    """Also those of its own step that are committed after it, and after an interruption the answer itself."""
    texts, raised = right_texts(opened, 3), []

    def fail(token_ids: Sequence[int], logits: Logits) -> Logits:
        if len(token_ids) == 9 and not raised:
            raised.append(error)
            raise error
        return logits

    drafted = drafting(opened, lambda: Oracle("right", texts, opened.runner.spec.vocab_size), FixedSizes(4))
    with engine_of(drafted) as client:
        ids = [
            client.add([i, 7, 9], replace(GREEDY, logits_processors=[fail] if i == at else None))
            for i in range(3)
        ]
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                client.drain()
        client.drain()
        for i, each in enumerate(ids):
            if i == at and error is ValueError:
                assert isinstance(client.error(each), InvalidRequestError)
                assert client.tokens_so_far(each) == texts[i][3:9]
            else:
                assert client.tokens_so_far(each) == texts[i][3:]


def test_an_error_of_one_answer_ends_the_others_to_the_same_prompt(opened: OpenedModel) -> None:
    """One of them has a tree in the same step, of which nothing is observed any more."""
    params = replace(GREEDY, n=2, temperature=1.0)
    texts = right_texts(opened, 1, params)

    def fail(token_ids: Sequence[int], logits: Logits) -> Logits:
        if len(token_ids) == 9:
            raise ValueError
        return logits

    drafted = drafting(opened, lambda: Oracle("right", texts, opened.runner.spec.vocab_size), FixedSizes(4))
    with engine_of(drafted) as client:
        steps = rows_of_steps(opened.runner)
        each = client.add([0, 7, 9], replace(params, logits_processors=[fail]))
        client.drain()
        assert [5, 5] in steps
        assert isinstance(client.error(each), InvalidRequestError)
        assert client.engine.statistics().free_memory.num_tree_rows == TREE_ROWS


@pytest.mark.parametrize("number", range(1, 5))
def test_an_interrupted_commit_among_several_is_computed_again(
    opened: OpenedModel, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, calls, commit = right_texts(opened, 3), count(1), opened.runner.commit

    def interrupted(sequence: kvcache.Sequence, rows: Sequence[int]) -> None:
        if next(calls) == number:
            raise KeyboardInterrupt
        commit(sequence, rows)

    drafted = drafting(opened, lambda: Oracle("right", texts, opened.runner.spec.vocab_size), FixedSizes(4))
    with engine_of(drafted) as client, monkeypatch.context() as patched:
        patched.setattr(opened.runner, "commit", interrupted)
        ids = add_all(client, 3)
        with pytest.raises(KeyboardInterrupt):
            client.drain()
        client.drain()
        assert [client.tokens_so_far(each) for each in ids] == [text[3:] for text in texts]


def test_cancelling_one_answer_within_a_step_leaves_the_others(opened: OpenedModel) -> None:
    texts = right_texts(opened, 3)
    drafted = drafting(opened, lambda: Oracle("right", texts, opened.runner.spec.vocab_size), FixedSizes(4))
    with engine_of(drafted) as client:

        def cancel(token_ids: Sequence[int], logits: Logits) -> Logits:
            if len(token_ids) == 9:
                client.engine.cancel(2)
            return logits

        ids = [
            client.add([i, 7, 9], replace(GREEDY, logits_processors=None if i else [cancel]))
            for i in range(3)
        ]
        client.drain()
        assert [client.tokens_so_far(each) for each in ids[:2]] == [text[3:] for text in texts[:2]]
        (output,) = client.outputs(ids[2])
        assert output.finish_reason == "cancelled"
        assert list(output.token_ids) == texts[2][3 : 3 + len(output.token_ids)]
