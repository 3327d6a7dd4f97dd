"""The sampler's kernels on the host: the very tokens of decoding's sampler, whatever the order of threads."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_cases import Case, check_choices, choose_all, random_case, random_logits, sample_all

from coldstream.decoding.sampling_params import SamplingParams
from coldstream.kernels.sample.cuda import ROW_BYTES, choosing_grid
from coldstream.kernels.sample.settings import BLOCKS_MISSED, bitmask_of
from host_device import HostDevice

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("vocab", [1, 2, 3, 31, 100, 511, 2047, 2048, 2049, 5000])
def test_random_cases(vocab: int) -> None:
    """With one workspace, as a captured step has it."""
    rng = np.random.default_rng(vocab)
    workspace = torch.zeros(4, ROW_BYTES, dtype=torch.uint8)
    for gap in range(8):
        cases = [random_case(rng, vocab) for _ in range(4)]
        check_choices(cases, CPU, workspace, gap % 3, ahead=gap % 2 == 1)


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("host")
@given(
    logits=st.lists(
        st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30, width=32)), min_size=1, max_size=40
    ),
    context=st.lists(st.integers(0, 0), min_size=1, max_size=5),
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 45),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    penalty=st.sampled_from([1.0, 1.5, 0.5]),
    window=st.sampled_from([None, 0, 1, 3]),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=200)
def test_any_settings(
    logits: list[float],
    context: list[int],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
    window: int | None,
    seed: int,
) -> None:
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        repeat_last_n=window,
    )
    check_choices([Case(np.array(logits, dtype=np.float32), context, params, seed)], CPU)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_many_seeds_draw_what_the_definition_draws(temperature: float) -> None:
    """A few tokens of similar probability, so that each draw matters."""
    logits = np.array([0.0, 0.1, -0.2, 0.1, -30.0, 0.05], dtype=np.float32)
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    seeds = [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(150)]
    cases = [Case(logits, [0] * (1 + number % 7), params, seed) for number, seed in enumerate(seeds)]
    check_choices(cases, CPU)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("spread", [0.0, 0.01, 2.0])
def test_truncation_within_crowded_bins(spread: float) -> None:
    """More tokens than the list holds may lie where top-k or top-p ends."""
    logits = (np.random.default_rng(2).standard_normal(10_000) * spread).astype(np.float32)
    every = [
        SamplingParams(temperature=1.5, top_k=top_k, top_p=top_p, min_p=0.0)
        for top_k, top_p in ((0, 0.9), (40, 1.0), (40, 0.3), (9_000, 0.9))
    ]
    check_choices([Case(logits, [0] * n, params, n) for n, params in enumerate(every, 1)], CPU)


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("vocab", [2049, 4095, 6144, 6145, 12_500])
def test_blocks_that_share_a_row(vocab: int) -> None:
    """A row alone has all multiprocessors, each with one tile or some; with one workspace."""
    rng = np.random.default_rng(vocab)
    workspace = torch.zeros(1, ROW_BYTES, dtype=torch.uint8)
    for number in range(12):
        check_choices([random_case(rng, vocab)], CPU, workspace, ahead=number % 2 == 1)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("order", ["equal", "in front", "behind"])
def test_more_tokens_than_a_list_holds_before_the_end_of_a_tile(order: str) -> None:
    """The k-th tile's largest logit does not say then where top-k ends."""
    logits = np.zeros(3 * 2048 + 5, dtype=np.float32)
    if order == "in front":
        logits[:4096] = np.arange(4096) % 7 + 1
    elif order == "behind":
        logits[2050:] = np.arange(len(logits) - 2050) / 4096
    every = [
        SamplingParams(temperature=1.5, top_k=top_k, top_p=top_p, min_p=min_p)
        for top_k, top_p, min_p in ((3, 1.0, 0.0), (4, 0.6, 0.0), (2, 0.9, 0.9))
    ]
    for seed, params in enumerate(every):
        check_choices([Case(logits, [0], params, seed)], CPU)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("kind", ["spread", "ties", "rising"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_ranks_by_the_models_own_logits(kind: str, temperature: float) -> None:
    """Of a row alone, with fewer and with more likeliest tokens than tiles, which a list may not hold."""
    rng = np.random.default_rng(7)
    logits = rng.standard_normal(3 * 2048 + 5).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "rising":
        logits = np.sort(logits)
    workspace = torch.zeros(1, ROW_BYTES, dtype=torch.uint8)
    mask = bitmask_of(rng.permutation(len(logits))[:500].tolist(), len(logits))
    params = SamplingParams(temperature=temperature, top_k=0, top_p=0.9, min_p=0.0)
    biased = replace(params, logit_bias={int(logits.argmax()): -50.0}, presence_penalty=1.5)
    for seed, count in enumerate((0, 1, 4, 5, 300, 1024)):
        for case in (
            Case(logits, [3], replace(params, logprobs=count), seed),
            Case(logits, [3], replace(biased, logprobs=count), seed),
            Case(logits, [3], replace(params, logprobs=count), seed, mask=mask),
        ):
            check_choices([case], CPU, workspace)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("vocab", [1, 31, 33, 2050, 4500])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_only_allowed_tokens_are_chosen(vocab: int, temperature: float) -> None:
    """With a token for each bit of a word, in rows with masks of their own."""
    rng = np.random.default_rng(vocab)
    plain = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    for params in (plain, replace(plain, top_k=3), replace(plain, top_p=0.7, repetition_penalty=1.2)):
        only = rng.permutation(vocab)[:4].tolist()
        masks = [bitmask_of([token], vocab) for token in only] + [bitmask_of([], vocab)]
        cases = [Case(random_logits(rng, vocab), [0], params, 5, mask=mask) for mask in masks]
        tokens, faults = sample_all(cases, CPU)
        assert tokens[:-1] == only
        assert faults == [0] * len(only) + [-1]


def test_blocks_without_a_place_are_waited_for_in_vain_and_the_next_launch_goes_well(
    compiled_for_the_host: HostDevice,
) -> None:
    """The device has three places, and its limits say four."""
    rng = np.random.default_rng(4)
    workspace = torch.zeros(2, ROW_BYTES, dtype=torch.uint8)
    alone = Case(rng.standard_normal(4 * 2048).astype(np.float32), [0], replace(PLAIN, logprobs=5), 1)
    more = replace(compiled_for_the_host.limits, num_processors=4)
    for params in (PLAIN, replace(PLAIN, logprobs=2), replace(PLAIN, top_k=3), replace(PLAIN, top_p=0.5)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled_for_the_host, "limits", more)
            with compiled_for_the_host.installed():
                made = choose_all([replace(alone, params=params)], CPU, workspace, may_change=True)
        assert [each.fault for each in made] == [BLOCKS_MISSED]
        with compiled_for_the_host.installed():
            check_choices([alone, replace(alone, seed=2)], CPU, workspace)


@given(rows=st.integers(1, 5000), tiles=st.integers(1, 2048), processors=st.integers(1, 300))
def test_blocks_that_wait_have_a_place_each_and_a_tile(rows: int, tiles: int, processors: int) -> None:
    of_a_row, at_once, _ = choosing_grid(rows, tiles, processors)
    each = -(-tiles // of_a_row)  # as the kernel shares them out
    assert 1 <= of_a_row * at_once <= processors
    assert (of_a_row - 1) * each < tiles <= of_a_row * each
    assert at_once == min(rows, processors)
    assert each <= -(-tiles // (processors // at_once))


@pytest.mark.usefixtures("host")
def test_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(3)
    cases = [random_case(rng, 300) for _ in range(12)]
    together, _ = sample_all(cases, CPU)
    assert [sample_all([case], CPU)[0][0] for case in cases] == together


@pytest.mark.usefixtures("host")
def test_faults_are_counted() -> None:
    good = np.zeros(3000, dtype=np.float32)
    bad, infinite, ruined = good.copy(), good.copy(), good.copy()
    bad[[1, 2047, 2999]] = [np.nan, np.inf, -np.inf]
    infinite[:] = np.finfo(np.float32).max
    ruined[::50] = np.nan
    boosted = SamplingParams(repetition_penalty=0.5)
    cases = [
        Case(good, [0], PLAIN, 0),
        Case(bad, [0], boosted, 0),
        Case(infinite, [3], boosted, 0),
        Case(ruined, [3], GREEDY, 0),
    ]
    tokens, faults = sample_all(cases, CPU)
    assert faults == [0, 3, -1, 60]
    assert all(0 <= token < 3000 for token in tokens)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_penalties_without_a_draw(temperature: float) -> None:
    """Or as good as without one; tokens are recent once, often, or in results that the host does not know."""
    rng = np.random.default_rng(5)
    for number in range(24):
        logits = rng.standard_normal(2500).astype(np.float32)
        likeliest = np.argsort(-logits)[: 1 + number % 6]
        context = [int(rng.integers(2500)), *rng.choice(likeliest, 3 * len(likeliest)).tolist()]
        params = SamplingParams(
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=float(rng.choice([1.0, 1.05])),
            presence_penalty=float(rng.choice([0.0, 0.02])),
            frequency_penalty=float(rng.choice([0.05, 0.1, -0.05])),
        )
        if number % 3 == 0:  # a bias counts twice, as it comes first
            biases = dict(zip(likeliest.tolist(), rng.uniform(-1, 1, len(likeliest)).tolist(), strict=True))
            params = replace(params, repetition_penalty=0.5, logit_bias=biases)
        check_choices([Case(logits, context, params, number)], CPU, ahead=number % 2 == 1)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("vocab", [1, 2, 3, 33, 2047, 2048, 2049, 10_000])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_without_a_draw_take_the_largest_logit(vocab: int, rows: int) -> None:
    """Twice with one workspace."""
    rng = np.random.default_rng(vocab + rows)
    workspace = torch.zeros(rows, ROW_BYTES, dtype=torch.uint8, device=CPU)
    for _ in range(2):
        cases = [Case(random_logits(rng, vocab), [0], GREEDY, 0) for _ in range(rows)]
        tokens, faults = sample_all(cases, CPU, workspace)
        assert tokens == [int(case.logits.argmax()) for case in cases]
        assert faults == [0] * rows
