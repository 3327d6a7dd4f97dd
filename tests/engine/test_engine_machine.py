"""An engine under any order of arrivals, cancels and steps: it always comes to an end, with the right tokens
and all memory accounted for. On a model that hashes its tokens, with far too little memory.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from engine_clients import Answer, Client, FakeClock, alone
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coldstream.engine import LLM, OpenedModel, SamplingParams
from coldstream.engine.engine import Engine
from coldstream.engine.limits import EngineLimits
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kvcache import CacheSize, SequenceCache
from hash_runner import HashRunner, open_hash_model

CONTEXT = 800
SIZES = {"small": CacheSize(5, 3), "many states": CacheSize(5, 9), "one state": CacheSize(4, 1)}
SHARED = list(range(100, 250))
PROMPTS = [
    [1, 2, 3],
    [1, 2, 3, 4, 5, 6],
    SHARED + [1] * 20,
    SHARED + [2] * 150,
    SHARED + [1] * 20 + [3] * 40,
    [7] * 250,
    [8] * 500,
]
KINDS = [
    SamplingParams(temperature=0.0, seed=1, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=6, n=3, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=4, max_tokens=30, stop_token_ids=list(range(0, 300, 7))),
]


def opened_hash_model(path: Path, size: CacheSize) -> OpenedModel:
    opened = open_hash_model(path, CONTEXT)
    runner = opened.runner
    assert isinstance(runner, HashRunner)
    runner.chunk_size = 64
    runner._limits = type(runner._limits)(runner.spec.vocab_size, CONTEXT, 64, 64)
    runner.cache_size = size
    runner._sequences = SequenceCache(runner.spec, CpuOps(1), size, "f32")
    return opened


_expected: dict[tuple[int, int], list[Answer]] = {}  # by prompt and kind, filled as they are needed


class Served(RuleBasedStateMachine):
    """Every request is either served as it is alone, or was cancelled."""

    size: CacheSize

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.opened = opened_hash_model(Path(self.folder.name) / "tiny.gguf", self.size)
        limits = EngineLimits(max_running=6, max_waiting=200, target_step_ms=20)
        self.client = Client(Engine(self.opened, limits, FakeClock()), self.opened)
        self.wishes: dict[int, tuple[int, int]] = {}
        self.cancelled: set[int] = set()

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        kind=st.integers(0, len(KINDS) - 1),
        priority=st.integers(-1, 1),
        namespace=st.sampled_from(["", "b"]),
        has_boundary=st.booleans(),
    )
    def add(self, prompt: int, kind: int, priority: int, namespace: str, has_boundary: bool) -> None:
        boundaries = (min(len(PROMPTS[prompt]), len(SHARED)),) if has_boundary else ()
        request_id = self.client.add(
            PROMPTS[prompt], KINDS[kind], priority=priority, namespace=namespace, boundaries=boundaries
        )
        self.wishes[request_id] = (prompt, kind)

    @precondition(lambda self: not self.client.engine.is_idle)
    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.client.step()

    @precondition(lambda self: self.wishes)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.wishes)))
        if not self.client.is_over(request_id):
            self.cancelled.add(request_id)
        self.client.engine.cancel(request_id)

    @precondition(lambda self: self.wishes)
    @rule()
    def drain(self) -> None:
        self.client.drain()
        for request_id, wish in self.wishes.items():
            assert self.client.is_over(request_id)
            if request_id in self.cancelled:
                reasons = {output.finish_reason for output in self.client.outputs(request_id)}
                assert "cancelled" in reasons
            else:
                assert self.client.answers(request_id) == expected_of(wish)

    @invariant()
    def what_is_kept_is_whole(self) -> None:
        self.client.engine.check_integrity()

    def teardown(self) -> None:
        self.drain()
        self.client.engine.close()
        assert self.opened.runner.free == self.size
        self.opened.close()
        self.folder.cleanup()


def expected_of(wish: tuple[int, int]) -> list[Answer]:
    """What a wish gets alone."""
    if wish not in _expected:
        with TemporaryDirectory() as folder:
            opened = opened_hash_model(Path(folder) / "tiny.gguf", CacheSize.of(2, CONTEXT))
            with LLM.from_opened(opened) as llm:
                _expected[wish] = alone(llm, PROMPTS[wish[0]], KINDS[wish[1]])
    return _expected[wish]


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_any_order_of_arrivals_cancels_and_steps(size: CacheSize) -> None:
    machine = type("Served", (Served,), {"size": size})
    case = machine.TestCase
    case.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
    case().runTest()


@pytest.mark.parametrize("num_blocks", [3, 6])
def test_prompts_at_their_first_rows_make_way_for_one_that_grows(tmp_path: Path, num_blocks: int) -> None:
    """They share no memory with a kept prefix that could be let go in their place."""
    params = replace(KINDS[0], max_tokens=30)
    prompts = [[7] * 254, *([number] * 200 for number in range(num_blocks - 1))]
    opened = opened_hash_model(tmp_path / "tiny.gguf", CacheSize(num_blocks, 9))
    with LLM.from_opened(opened) as llm:
        client = Client(Engine(opened, EngineLimits(target_step_ms=20), FakeClock()), opened)
        ids = [client.add(prompts[0], params)]
        for _ in range(5):
            client.step()
        ids += [client.add(prompt, params) for prompt in prompts[1:]]
        client.drain()
        assert client.engine.statistics().preemptions > 0
        answers = [client.answers(each) for each in ids]
        client.engine.close()
        assert answers == [alone(llm, prompt, params) for prompt in prompts]
