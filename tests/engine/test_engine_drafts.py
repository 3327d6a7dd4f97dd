"""Drafts in an engine: for an answer that is alone, and with the tokens that it has without."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from engine_clients import Answer, Client, alone, answer_of, engine_of
from scripted_drafts import KINDS
from test_drafts import PARAMS, PROMPTS, Observing, Pair

from coldstream import kvcache
from coldstream.assets import demo_model_path
from coldstream.decoding import FixedSizes, Grammar, Logits, SizesByCost, Speculation, TokenTree
from coldstream.engine import LLM, EngineConfig, OpenedModel, SamplingParams, open_model
from coldstream.errors import InvalidRequestError
from coldstream.kvcache import Batch
from coldstream.models.cpu.runner import CpuRunner

GREEDY = PARAMS["greedy"]


@pytest.fixture(scope="module")
def demo() -> Iterator[Pair]:
    pair = Pair(demo_model_path())
    yield pair
    pair.close()


def observed(demo: Pair, params: SamplingParams = GREEDY, kind: str = "right") -> Observing:
    """A drafter that knows the answers, and checks what it observes."""
    return Observing(kind, demo.scripted(kind, PROMPTS, params).answers, demo.vocab_size)


def drafting(demo: Pair, drafter: Observing, num_nodes: int = 6) -> OpenedModel:
    return replace(demo.opened, speculation=Speculation(drafter, FixedSizes(num_nodes)))


def ids_of(demo: Pair, prompt: str) -> list[int]:
    return demo.opened.tokenizer.encode(prompt)


def plain(demo: Pair, prompt: str, params: SamplingParams) -> list[Answer]:
    demo.plain.forget()
    return alone(demo.plain, ids_of(demo, prompt), replace(params, seed=params.seed or 0))


def seeded(params: SamplingParams) -> SamplingParams:
    return replace(params, seed=params.seed or 0)


def add(client: Client, demo: Pair, prompt: str, params: SamplingParams) -> int:
    return client.add(ids_of(demo, prompt), seeded(params))


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_an_answer_that_is_alone_is_drafted(demo: Pair, params: SamplingParams) -> None:
    opened = drafting(demo, observed(demo, seeded(params)))
    with engine_of(opened) as client:
        for prompt in PROMPTS:
            each = add(client, demo, prompt, params)
            client.drain()
            assert client.answers(each) == plain(demo, prompt, params)
            speculation = client.outputs(each)[0].statistics.speculation
            assert speculation is not None
            assert speculation.accepted > 0
        statistics = client.engine.statistics()
        assert statistics.accepted_tokens > 0.4 * statistics.generated_tokens
        assert statistics.steps < statistics.generated_tokens


def test_experts_of_a_step_count_for_each_answer_that_has_a_draft_in_it(
    demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a step uses 7 experts and misses 2, and steps of prompts are among them."""
    uses = [0, 0]
    step = CpuRunner.step

    def counting(self: CpuRunner, batch: Batch) -> object:
        uses[:] = uses[0] + 5, uses[1] + 2
        return step(self, batch)

    monkeypatch.setattr(CpuRunner, "step", counting)
    monkeypatch.setattr(CpuRunner, "expert_uses", property(lambda self: (uses[0], uses[1])))
    with engine_of(drafting(demo, observed(demo))) as client:
        each = add(client, demo, PROMPTS[0], GREEDY)
        client.drain()
        found = client.outputs(each)[0].statistics.speculation
    assert found.experts_per_draft == (7, 2)
    assert (found.experts, found.cold_experts) == (7 * found.drafted_steps, 2 * found.drafted_steps)
    assert 0 < found.build_s + found.choose_s < found.draft_s + found.verify_s


@pytest.mark.sharded(6)
@pytest.mark.parametrize("kind", KINDS)
def test_any_draft_leaves_the_answers(demo: Pair, kind: str) -> None:
    drafter = demo.scripted(kind, PROMPTS, GREEDY)
    lenient = Observing(kind, drafter.answers, drafter.vocab_size, drafter.end_id)
    lenient.propose = lenient.drafted  # type: ignore[method-assign]
    with engine_of(drafting(demo, lenient)) as client:
        each = add(client, demo, PROMPTS[0], GREEDY)
        client.drain()
        assert client.answers(each) == plain(demo, PROMPTS[0], GREEDY)


def test_it_is_drafted_again_once_the_others_are_gone(demo: Pair) -> None:
    """In between it decodes beside them, which the drafter does not observe."""
    drafter = observed(demo)
    short = replace(GREEDY, max_tokens=4)
    with engine_of(drafting(demo, drafter, num_nodes=2)) as client:
        first = add(client, demo, PROMPTS[0], GREEDY)
        for _ in range(4):
            client.step()
        before = client.engine.statistics().drafted_tokens
        second = add(client, demo, PROMPTS[1], short)
        while not client.is_over(second):
            client.step()
        between = client.engine.statistics().drafted_tokens
        client.drain()
        assert 0 < before == between < client.engine.statistics().drafted_tokens
        assert client.answers(first) == plain(demo, PROMPTS[0], GREEDY)
        assert client.answers(second) == plain(demo, PROMPTS[1], short)
    assert drafter.gaps > 0


def test_no_draft_is_longer_than_what_is_left_of_the_answer_without_the_token_that_follows_it(
    demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, asked = observed(demo), []
    propose = drafter.propose

    def noted(context: Sequence[int], budget: int) -> TokenTree:
        asked.append((len(context), budget))
        return propose(context, budget)

    monkeypatch.setattr(drafter, "propose", noted)
    prompt = ids_of(demo, PROMPTS[0])
    with engine_of(drafting(demo, drafter, num_nodes=6)) as client:
        for count in (9, 5, 2):
            asked.clear()
            client.add(prompt, seeded(replace(GREEDY, max_tokens=count)))
            client.drain()
            left = [(len(prompt) + count - length, budget) for length, budget in asked]
            assert [budget for _, budget in left] == [min(6, most - 1) for most, _ in left if most > 1]
            assert asked or count == 2


def test_the_next_turn_is_drafted_from_what_is_reused(demo: Pair) -> None:
    with engine_of(drafting(demo, observed(demo))) as client:
        first = add(client, demo, PROMPTS[1], GREEDY)
        client.drain()
        turn = [*ids_of(demo, PROMPTS[1]), *client.tokens_so_far(first), 7, 7]
        second = client.add(turn, seeded(GREEDY))
        client.drain()
        assert client.num_reused(second) == len(turn) - 3
        demo.plain.forget()
        assert client.answers(second) == alone(demo.plain, turn, seeded(GREEDY))


def test_an_answer_of_a_list_is_drafted_once_it_is_alone_and_so_is_what_follows_the_list(demo: Pair) -> None:
    """The list's engine and the sequence that is live afterwards have one drafter, which followed another
    answer than the last one.
    """
    drafter = observed(demo)
    llm = LLM.from_opened(drafting(demo, drafter))
    params = [seeded(GREEDY), replace(seeded(GREEDY), max_tokens=4)]
    long, short = (output.outputs[0] for output in llm.generate(PROMPTS[:2], params))
    assert short.statistics.speculation is not None
    assert (short.statistics.speculation.steps, short.statistics.speculation.drafted) == (3, 0)
    assert long.statistics.speculation is not None
    assert long.statistics.speculation.accepted > 0
    turn = [*ids_of(demo, PROMPTS[1]), *short.token_ids, 7, 7]
    (after,) = llm.generate([turn], seeded(GREEDY))[0].outputs
    assert after.statistics.reused_tokens == len(turn) - 3
    llm.forget()
    for prompt, each, answer in zip(PROMPTS, params, (long, short), strict=False):
        assert [answer_of(answer)] == plain(demo, prompt, each)
    demo.plain.forget()
    assert [answer_of(after)] == alone(demo.plain, turn, seeded(GREEDY))


def test_drafters_of_a_closed_engine_give_their_memory_back() -> None:
    """Each engine has drafters of its own, of which the block has room for those of one engine."""
    config = EngineConfig(str(demo_model_path()), device="cpu", threads=1, ctx_size=300, parallel=3)
    opened = open_model(replace(config, spec_type="mtp", tree_budget=3))
    prompts = [opened.tokenizer.encode(prompt) for prompt in PROMPTS]
    drafted = []
    for _ in range(4):
        with engine_of(opened) as client:
            ids = [client.add(prompt, replace(seeded(GREEDY), ignore_eos=True)) for prompt in prompts]
            client.drain()
            found = [client.outputs(each)[0].statistics.speculation for each in ids]
            drafted.append([each.drafted for each in found if each is not None])
    opened.close()
    assert drafted == [drafted[0]] * 4
    assert min(drafted[0]) > 30


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("spec_type", ["mtp", "ngram"])
def test_the_products_own_drafters_leave_the_answers(demo: Pair, spec_type: str) -> None:
    config = EngineConfig(str(demo_model_path()), device="cpu", threads=1, ctx_size=512, spec_type=spec_type)
    opened = open_model(replace(config, tree_budget=3))
    with LLM.from_opened(opened), engine_of(opened) as client:
        for prompt in PROMPTS:
            each = add(client, demo, prompt, GREEDY)
            client.drain()
            assert client.answers(each) == plain(demo, prompt, GREEDY)
        assert client.engine.statistics().drafted_tokens > 0


def test_sizes_are_chosen_by_what_steps_take(demo: Pair) -> None:
    drafter = observed(demo)
    opened = replace(demo.opened, speculation=Speculation(drafter, SizesByCost("scripted")))
    with engine_of(opened) as client:
        each = add(client, demo, PROMPTS[0], GREEDY)
        client.drain()
        speculation = client.outputs(each)[0].statistics.speculation
        assert speculation is not None
        assert speculation.steps + speculation.accepted == len(client.tokens_so_far(each)) - 1
        assert client.answers(each) == plain(demo, PROMPTS[0], GREEDY)


def test_sp08_cancel_invalidates_the_rest_of_a_draft(demo: Pair) -> None:
    num_prompt = len(ids_of(demo, PROMPTS[0]))

    with engine_of(drafting(demo, observed(demo))) as client:

        def cancel(token_ids: Sequence[int], logits: Logits) -> Logits:
            if len(token_ids) == num_prompt + 5:
                client.engine.cancel(0)
            return logits

        each = add(client, demo, PROMPTS[0], replace(GREEDY, logits_processors=[cancel]))
        client.drain()
        (output,) = client.outputs(each)
        assert output.finish_reason == "cancelled"
        assert 5 <= len(output.token_ids) <= 6
        wanted = plain(demo, PROMPTS[0], GREEDY)[0][1]
        assert output.token_ids == wanted[: len(output.token_ids)]  # type: ignore[index]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_along_a_draft(demo: Pair, error: type[BaseException]) -> None:
    """One of the request ends it; after an interruption it goes on with the same tokens."""
    num_prompt = len(ids_of(demo, PROMPTS[0]))
    raised: list[type[BaseException]] = []

    def fail(token_ids: Sequence[int], logits: Logits) -> Logits:
        if len(token_ids) == num_prompt + 5 and not raised:
            raised.append(error)
            raise error
        return logits

    with engine_of(drafting(demo, observed(demo))) as client:
        each = add(client, demo, PROMPTS[0], replace(GREEDY, logits_processors=[fail]))
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                client.drain()
            client.drain()
            assert client.answers(each) == plain(demo, PROMPTS[0], GREEDY)
        else:
            client.drain()
            assert isinstance(client.error(each), InvalidRequestError)
            assert len(client.tokens_so_far(each)) == 5


def test_sp06_a_grammar_holds_along_drafts(demo: Pair) -> None:
    params = replace(GREEDY, grammar=Grammar("regex", "[a-z]{20,30} = [0-9]+"), max_tokens=30)
    wanted = plain(demo, PROMPTS[0], params)
    drafter = Observing("right", {tuple(ids_of(demo, PROMPTS[0])): wanted[0][1]}, demo.vocab_size)  # type: ignore[dict-item]
    with engine_of(drafting(demo, drafter)) as client:
        each = add(client, demo, PROMPTS[0], params)
        client.drain()
        assert client.answers(each) == wanted
        assert client.engine.statistics().accepted_tokens > 0


def test_sp08_an_interrupted_commit_is_computed_again(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, calls = drafting(demo, observed(demo)), []
    commit = opened.runner.commit

    def interrupted(sequence: kvcache.Sequence, rows: Sequence[int]) -> None:
        calls.append(rows)
        if len(calls) == 2:
            raise KeyboardInterrupt
        commit(sequence, rows)

    with engine_of(opened) as client, monkeypatch.context() as patched:
        patched.setattr(opened.runner, "commit", interrupted)
        each = add(client, demo, PROMPTS[0], GREEDY)
        with pytest.raises(KeyboardInterrupt):
            client.drain()
        client.drain()
        assert client.answers(each) == plain(demo, PROMPTS[0], GREEDY)


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("spec_type", ["mtp", "ngram"])
@pytest.mark.parametrize("tree_budget", [3, "auto"])
def test_the_products_own_drafters_follow_several_answers(spec_type: str, tree_budget: int | str) -> None:
    config = EngineConfig(
        str(demo_model_path()), device="cpu", threads=1, ctx_size=512, parallel=4, spec_type="none"
    )
    prompts = ["def add(a, b):\n", "import os\nimport sys\n", "class Shape:", "for i in range(10):\n    "]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, seed=1)
    with LLM.from_opened(open_model(config)) as llm:
        ids = [llm.opened.tokenizer.encode(prompt) for prompt in prompts]
        wanted = [alone(llm, each, params) for each in ids]
    opened = open_model(replace(config, spec_type=spec_type, tree_budget=tree_budget))
    with LLM.from_opened(opened), engine_of(opened) as client:
        requests = [client.add(each, params) for each in ids]
        client.drain()
        assert [client.answers(each) for each in requests] == wanted
        if tree_budget == 3:
            statistics = client.engine.statistics()
            least = {"mtp": 0.3, "ngram": 0.02}[spec_type]
            assert statistics.accepted_tokens > least * statistics.generated_tokens
        follow_up = [*ids[0], *client.tokens_so_far(requests[0]), *ids[1]]
        next_turn = client.add(follow_up, params)
        client.drain()
        answers = client.answers(next_turn)
    with LLM.from_opened(open_model(config)) as llm:
        assert answers == alone(llm, follow_up, params)
