"""Steps of an engine on a GPU that leave states behind, and whose tokens nobody has seen yet."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from engine_clients import Client, alone, engine_of
from test_ahead_on_gpu import GREEDY
from test_engine_on_gpu import models, path

from coldstream.engine import LLM
from coldstream.engine.engine import Engine
from coldstream.engine.limits import EngineLimits
from coldstream.errors import DeviceError
from coldstream.kvcache import Batch, Segment

__all__ = ["models", "path"]

PROMPT = [number % 11 for number in range(34)]
PARAMS = replace(GREEDY, max_tokens=5)


def kept_lengths(client: Client) -> list[int]:
    return sorted(each.node.length for each in client.engine._served.memory.cache._kept)


@pytest.mark.sharded(of="models on a GPU")
def test_what_a_step_in_flight_has_left_is_kept_once_its_token_is_known(models: tuple[LLM, LLM]) -> None:
    gpu, cpu = models
    wanted = alone(cpu, PROMPT, PARAMS)[0][1]
    longer = [*PROMPT[:17], 9, 9]
    with engine_of(gpu.opened) as client:
        request = client.add(PROMPT, PARAMS, boundaries=(17,))
        client.step()
        assert client.engine._in_flight is not None
        assert (client.tokens_so_far(request), kept_lengths(client)) == ([], [])
        client.step()
        assert kept_lengths(client) == [17, 33]
        client.drain()
        assert tuple(client.tokens_so_far(request)) == wanted
        again = client.add(longer, PARAMS)
        client.drain()
        assert client.num_reused(again) == 17
        assert tuple(client.tokens_so_far(again)) == alone(cpu, longer, PARAMS)[0][1]


@pytest.mark.parametrize("how", ["cancelled", "interrupted", "closed"])
def test_a_step_in_flight_that_nobody_waits_for_gives_its_forks_back(
    models: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gpu, cpu = models
    before = gpu.opened.runner.free
    client = Client(Engine(gpu.opened, EngineLimits()), gpu.opened)
    request = client.add(PROMPT, PARAMS, boundaries=(17,))
    client.step()
    assert gpu.opened.runner.free.num_states == before.num_states - 3
    if how == "cancelled":
        client.engine.cancel(request)
        client.drain()
        assert client.outputs(request)[0].finish_reason == "cancelled"
    elif how == "interrupted":

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "_may_run_ahead", interrupt)
            with pytest.raises(KeyboardInterrupt):
                client.step()
        assert gpu.opened.runner.free == before
        client.drain()
        assert tuple(client.tokens_so_far(request)) == alone(cpu, PROMPT, PARAMS)[0][1]
    client.engine.close()
    assert gpu.opened.runner.free == before


def test_a_step_that_fails_behind_the_host_leaves_no_fork(
    models: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some experts are in the file, which is looked at once the step has ended."""
    runner = models[0].opened.runner
    before, (text, fork) = runner.free, (runner.new_sequence() for _ in range(2))
    (logits,) = runner.step(Batch((Segment(text, PROMPT, forks=((17, fork),)),)))
    assert (text.length, fork.length) == (34, 17)

    def fail() -> None:
        raise DeviceError("made to fail")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "check_file", fail)
        with pytest.raises(DeviceError):
            np.asarray(logits)
    assert (text.length, fork.length) == (0, 0)
    assert runner.free == before
