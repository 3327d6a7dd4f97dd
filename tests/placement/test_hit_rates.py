"""Hit rates expected: published points, replayed traces, and layers that always hit."""

from types import SimpleNamespace

import numpy as np
import pytest

from coldstream.placement import hit_rates
from coldstream.placement.hit_rates import PUBLISHED, HitCurve, expected_hit_rates, novelty_of
from coldstream.placement.policies import DecayedFrequency, simulate
from coldstream.placement.prompt_cost import expected_touched
from coldstream.placement.routing_trace import RoutedModel, RoutingTrace
from coldstream.placement.sizes import NOVELTY

MODEL = RoutedModel("ac98d166eabcd4c77c6349aa95570033", num_layers=3, num_experts=40, num_experts_per_tok=4)


def skewed_trace(num_steps: int) -> RoutingTrace:
    rng = np.random.default_rng(5)
    keys = rng.exponential(size=(num_steps, 3, 40)) * (1.0 + np.arange(40))
    return RoutingTrace(MODEL, keys.argsort(axis=2)[:, :, :4].astype(np.uint16))


def test_published_points_and_lines_between() -> None:
    assert [PUBLISHED.at(share) for share in (0.0, 0.19, 0.38, 1.0)] == [0.0, 0.741, 0.894, 1.0]
    assert PUBLISHED.at(0.125) == pytest.approx((0.366 + 0.741) / 2)


@pytest.mark.sharded
@pytest.mark.parametrize("num_steps", [2, 500, 2500])
def test_a_trace_gives_what_the_policy_holds_of_its_end(num_steps: int) -> None:
    trace = skewed_trace(num_steps)
    curve = HitCurve.from_trace(trace)
    assert curve.hit_rates[0] == 0.0
    assert curve.hit_rates[-1] == 1.0
    split = max(num_steps - 2000, num_steps // 2)
    assert f"last {num_steps - split} tokens" in curve.source
    profile = RoutingTrace(MODEL, trace.topk_ids[:split]).counts() / split
    end = RoutingTrace(MODEL, trace.topk_ids[split:])
    replayed = simulate(end, DecayedFrequency(), 60, profile).hit_rate
    assert curve.at(0.5) >= replayed
    if num_steps > 2:
        assert curve.at(0.5) == replayed > 0.5


def test_layers_that_are_weighed_are_weighed_in_a_replay() -> None:
    trace = skewed_trace(300)
    weights = np.repeat([8.0, 1.0, 1.0], 40)
    profile, end = trace.counts(), RoutingTrace(MODEL, trace.topk_ids[150:])
    profile = RoutingTrace(MODEL, trace.topk_ids[:150]).counts() / 150
    replayed = simulate(end, DecayedFrequency(weights=weights), 60, profile).hit_rate
    assert HitCurve.from_trace(trace, weights).at(0.5) == replayed != HitCurve.from_trace(trace).at(0.5)


def test_a_trace_of_one_step_is_enough() -> None:
    assert HitCurve.from_trace(skewed_trace(1)).at(0.5) == 0.0


def test_whole_layers_always_hit_and_leave_the_others_as_they_are() -> None:
    assert expected_hit_rates(PUBLISHED, [40, 10, 5], 40) == (
        1.0,
        PUBLISHED.at(15 / 80),
        PUBLISHED.at(15 / 80),
    )
    assert expected_hit_rates(PUBLISHED, [40, 40], 40) == (1.0, 1.0)
    assert expected_hit_rates(PUBLISHED, [0, 0], 0) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("shares", "hit_rates"),
    [((0.0, 0.5), (0.0, 1.0)), ((0.0, 1.0), (0.1, 1.0)), ((0.0, 0.6, 0.5, 1.0), (0.0, 0.1, 0.2, 1.0))],
)
def test_a_curve_that_is_none(shares: tuple[float, ...], hit_rates: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="rises from 0 to 1"):
        HitCurve(shares, hit_rates, "nowhere")


def test_a_curve_rises_though_a_replay_with_more_slots_hit_less(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([0.1, 0.5, 0.4, 0.3, 0.6, 0.55, 0.8, 0.7])
    monkeypatch.setattr(hit_rates, "simulate", lambda *of: SimpleNamespace(hit_rate=next(found)))
    curve = HitCurve.from_trace(skewed_trace(8))
    assert curve.hit_rates == (0.0, 0.1, 0.5, 0.5, 0.5, 0.6, 0.6, 0.8, 0.8, 1.0)


@pytest.mark.parametrize("repeated", [1, 4])
def test_how_alike_tokens_choose_is_what_stretches_of_a_trace_touch(repeated: int) -> None:
    """Tokens that each come several times touch as many experts as fewer tokens would by themselves."""
    model, generator = RoutedModel("f", 2, 64, 4), np.random.default_rng(5)
    chosen = [[generator.permutation(64)[:4] for _ in range(2)] for _ in range(1024 // repeated)]
    trace = RoutingTrace(model, np.repeat(np.array(chosen, np.uint16), repeated, axis=0))
    novelty, count = novelty_of(trace), 256
    assert count**novelty == pytest.approx(count / repeated, rel=0.25)
    rows = count * trace.counts() / trace.num_steps
    touched = [len({*layer.ravel()}) for layer in np.moveaxis(trace.topk_ids[:count], 1, 0)]
    assert expected_touched(rows, count, novelty).sum() == pytest.approx(sum(touched), rel=0.05)


def test_a_short_trace_does_not_say_how_alike_tokens_choose() -> None:
    model = RoutedModel("f", 1, 8, 2)
    assert (
        novelty_of(RoutingTrace(model, np.zeros((63, 1, 2), np.uint16) + np.array([0, 1], np.uint16)))
        == NOVELTY
    )
