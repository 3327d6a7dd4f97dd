"""After a step the policy knows its uses; after a failed or interrupted one nothing has changed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from one_sequence import open_cpu
from runner_cases import MIX, token_ids

from builders import Dims, write_gguf
from coldstream.placement.policies import Lru
from ram_budgets import least_ram

ERRORS = [RuntimeError("made to fail"), KeyboardInterrupt()]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe.gguf"
    write_gguf(path, types=MIX, dims=Dims(experts=24))
    return path


def fail_after(work: Callable[..., object], error: BaseException) -> Callable[..., None]:
    """`work`, and then the error: whatever it changes has been changed."""

    def failing(*arguments: object) -> None:
        work(*arguments)
        raise error

    return failing


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("part", ["_launch", "_logits_of"])
def test_whatever_part_of_a_step_fails_the_state_is_empty_afterwards(
    path: Path, part: str, error: BaseException
) -> None:
    with open_cpu(path, threads=1, context_length=64) as runner:
        expected = runner.logits(token_ids(9))
        work = getattr(runner, part)
        for ask in (runner.prefill, runner.logits):
            runner.prefill(token_ids(5))
            setattr(runner.runner, part, fail_after(work, error))
            with pytest.raises(type(error)):
                ask(token_ids(20))
            assert runner.position == 0
            setattr(runner.runner, part, work)
            assert np.array_equal(runner.prefill(token_ids(9)), expected[-1])


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_experts_that_a_failed_step_has_read_are_forgotten(path: Path, error: BaseException) -> None:
    budget = least_ram(path, context_length=64, threads=1) + (4 << 20)

    def num_resident() -> int:
        pool = runner._disk.pool  # type: ignore[union-attr]
        return sum(int((pool.owners(size) >= 0).sum()) for size in range(len(pool.slot_bytes)))

    with open_cpu(path, threads=1, context_length=64, ram_bytes=budget) as runner:
        expected = runner.prefill(token_ids(9))
        assert num_resident() > 0
        trunk = runner._trunk
        runner.runner._trunk = FailingGraph(trunk, error)
        with pytest.raises(type(error)):
            runner.prefill(token_ids(3))
        assert num_resident() == 0
        runner.runner._trunk = trunk
        assert runner.position == 0
        assert np.array_equal(runner.prefill(token_ids(9)), expected)


class FailingGraph:
    """A captured graph that runs, and fails then."""

    def __init__(self, graph: object, error: BaseException) -> None:
        self.run = fail_after(graph.run, error)  # type: ignore[attr-defined]


def test_steps_that_decode_teach_the_policy_and_prompts_do_not(path: Path) -> None:
    noted: list[set[int]] = []

    class Noting(Lru):
        def observe(self, used: np.ndarray) -> None:
            super().observe(used)
            noted.append(set(used.tolist()))

    budget = least_ram(path, context_length=64, threads=1) + (4 << 20)
    with open_cpu(path, threads=1, context_length=64, ram_bytes=budget, policy=Noting()) as runner:
        runner.prefill(token_ids(20))
        assert noted == []
        for count, token in enumerate((3, 4, 5), start=1):
            runner.decode(token)
            assert len(noted) == count
            num_layers = len({expert // runner.spec.num_experts for expert in noted[-1]})
            assert num_layers == runner.spec.num_layers
            assert len(noted[-1]) == num_layers * runner.spec.num_experts_per_tok
