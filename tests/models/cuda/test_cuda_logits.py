"""Tokens of a step's rows chosen on a device: each is what it is alone, and what the CPU chooses.

The kernels run on the host, and on a GPU where there is one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from coldstream.decoding import Logits, Outcome, SampledToken, SamplingParams, TokenChoice, begin_choices
from coldstream.errors import DeviceError, GenerationFault
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.contents import CudaArray, clear, joined, new, read
from coldstream.kernels.cuda.runtime import streams
from coldstream.kernels.sample.settings import Bitmask, bitmask_of
from coldstream.models.cuda.logits import (
    MOST_RANKED,
    RECENT_OF_A_ROW,
    OnDevice,
    Sampler,
    StepLogits,
)
from device_arrays import array_of
from host_device import HostDevice
from host_driver import HostStream
from host_gpu import gpu_on

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
PENALISED = replace(GREEDY, frequency_penalty=1.5, presence_penalty=1.0, repeat_last_n=None)
CONTEXT_LENGTH = 100


@dataclass(frozen=True)
class Counts:
    """What was asked of the device so far."""

    launches: int
    uploads: int
    waits: int
    downloads: int

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(a - b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class Counted:
    """A GPU on the host."""

    device: HostDevice
    stream: HostStream

    @property
    def counts(self) -> Counts:
        stream = self.stream
        return Counts(self.device.launches, stream.num_uploads, stream.num_waits, stream.num_downloads)


@pytest.fixture
def gpu(compiled_for_the_host: HostDevice) -> Iterator[Counted]:
    with gpu_on(compiled_for_the_host) as stream:
        yield Counted(compiled_for_the_host, stream)


def on_device(values: Logits, num_rows: int = 8, context_length: int = CONTEXT_LENGTH) -> StepLogits:
    """Logits of a step on a device with memory for `num_rows` rows."""

    def zeros(shape: tuple[int, ...], dtype: str) -> CudaArray:
        array = new(shape, dtype)
        clear(array)
        return array

    def download(parts: Sequence[DeviceArray]) -> np.ndarray[Any, Any]:
        return read(joined(parts))

    step = OnDevice(
        array_of(torch.from_numpy(values)),
        Sampler(zeros, num_rows, context_length, values.shape[1]),
        lambda: True,
        download,
        lambda event: streams.current_stream().synchronize(),
    )
    return StepLogits(step, range(len(values)))


def far(choices: Sequence[TokenChoice], logits: StepLogits, rows: Sequence[int]) -> list[TokenChoice]:
    """The same choices by rows of a step."""
    return [replace(choice, logits=logits[row]) for choice, row in zip(choices, rows, strict=True)]


def shown(outcomes: Sequence[Outcome]) -> list[object]:
    return [str(each) if isinstance(each, Exception) else each for each in outcomes]


def check(choices: Sequence[TokenChoice], **memory: int) -> None:
    """Together, in any order and one by one on a device, and on the CPU; the logits stay."""
    values = np.stack([np.asarray(choice.logits) for choice in choices])
    logits = on_device(values, **memory)
    rows = np.random.default_rng(len(choices)).permutation(len(choices)).tolist()
    expected = shown(begin_choices(choices).outcomes())
    for _ in range(2):
        assert shown(begin_choices(far(choices, logits, range(len(choices)))).outcomes()) == expected
    shuffled = far([choices[row] for row in rows], logits, rows)
    assert shown(begin_choices(shuffled).outcomes()) == [expected[row] for row in rows]
    assert [shown(begin_choices([each]).outcomes())[0] for each in shuffled] == [
        expected[row] for row in rows
    ]
    assert np.asarray(logits).tobytes() == values.tobytes()


params_of_rows = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    repeat_last_n=st.sampled_from([None, 0, 1, 5, 64]),
    logprobs=st.sampled_from([None, None, None, 0, 1, 40]),
    logit_bias=st.sampled_from([None, None, {2: 1.5, 7: -100.0}, dict.fromkeys(range(9), 2.5)]),
)
contexts = st.lists(st.integers(0, 9), max_size=20)
seeds = st.integers(0, 2**64 - 1)
allowed_of = st.sampled_from([None, None, 1, 2, 7, 1000])  # token is allowed
Row = tuple[list[int], SamplingParams, int, int | None]
any_rows = st.lists(st.tuples(contexts, params_of_rows, seeds, allowed_of), min_size=1, max_size=6)


@dataclass
class SomeTokens:
    """A constraint that allows every n-th token, from one on that depends on the context."""

    every: int
    vocab: int

    def allowed(self, context: Sequence[int]) -> Bitmask:
        return bitmask_of(range(sum(context) % self.every, self.vocab, self.every), self.vocab)


def random_choices(rows: Sequence[Row], vocab: int, broken: bool) -> list[TokenChoice]:
    """The first of them broken."""
    values = np.random.default_rng(len(rows)).normal(size=(len(rows), vocab)).astype(np.float32) * 2
    values[: int(broken), vocab // 2] = np.nan
    choices = [
        TokenChoice(values[i], context, params, seed) for i, (context, params, seed, _) in enumerate(rows)
    ]
    return [
        choice if every is None else replace(choice, constraint=SomeTokens(every, vocab))
        for choice, (_, _, _, every) in zip(choices, rows, strict=True)
    ]


@pytest.mark.usefixtures("gpu")
@given(any_rows, st.sampled_from([10, 33, 2050]), st.booleans(), st.sampled_from([1, 2, 6]))
@settings(max_examples=25)
def test_rows_are_each_what_they_are_alone_and_on_the_cpu(
    rows: list[Row], vocab: int, broken: bool, num_rows: int
) -> None:
    check(random_choices(rows, vocab, broken), num_rows=num_rows)


@pytest.mark.gpu
@given(any_rows, st.sampled_from([10, 33, 2050, 9000]), st.booleans(), st.sampled_from([1, 2, 6]))
def test_rows_are_each_what_they_are_alone_on_a_gpu(
    rows: list[Row], vocab: int, broken: bool, num_rows: int
) -> None:
    check(random_choices(rows, vocab, broken), num_rows=num_rows)


def rows_with_windows(vocab: int) -> list[TokenChoice]:
    """Contexts that are empty, shorter than their window, as long, and longer. The first token outside of the
    window is chosen.
    """
    values = (np.arange(vocab, 0, -1, dtype=np.float32) / vocab)[None]
    lengths = [(0, 4), (1, 4), (3, 4), (4, 4), (5, 4), (9, 4), (9, 1), (9, 0), (9, None), (9, 9), (9, 10)]
    choices = []
    for length, window in lengths:
        params = replace(PENALISED, repeat_last_n=window)
        choices += [
            TokenChoice(values[0], context, params, 0)
            for context in (list(range(length)), list(range(length))[::-1])
        ]
    return choices


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("num_rows", [1, 5, 22])
def test_penalties_look_back_as_far_as_each_row_says(num_rows: int) -> None:
    choices = rows_with_windows(16)
    tokens = [
        outcome.token_id for outcome in begin_choices(choices).outcomes() if isinstance(outcome, SampledToken)
    ]
    assert tokens == [0, 0, 1, 1, 3, 3, 4, 4, 0, 4, 0, 4, 0, 1, 0, 0, 9, 9, 9, 9, 9, 9], "windows decide"
    check(choices, num_rows=num_rows)


@pytest.mark.gpu
def test_penalties_look_back_as_far_as_each_row_says_on_a_gpu() -> None:
    check(rows_with_windows(16), num_rows=22)
    check(rows_with_windows(5000), num_rows=5)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("params", [GREEDY, PENALISED, SAMPLED])
def test_any_number_of_rows_takes_one_copy_one_wait_and_one_launch(
    gpu: Counted, count: int, params: SamplingParams
) -> None:
    values = np.random.default_rng(0).normal(size=(8, 40)).astype(np.float32)
    logits = on_device(values)
    kinds = [GREEDY, PENALISED, params]
    choices = [TokenChoice(logits[row], [1, 2, row], kinds[row % 3], 5) for row in range(count - 1)]
    choices.append(TokenChoice(logits[7], [3], params, 5))
    before = gpu.counts
    begin_choices(choices).outcomes()
    assert gpu.counts - before == Counts(launches=1, uploads=1, waits=1, downloads=1)


def test_rows_beyond_the_memory_wait_for_those_before_them(gpu: Counted) -> None:
    """There is memory for two rows, whose penalties look at one context or at a few tokens each."""
    values = np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32)
    num_recent = max(CONTEXT_LENGTH, 2 * RECENT_OF_A_ROW)
    whole, half = [3] * CONTEXT_LENGTH, [4] * (num_recent // 2)
    for contexts, num_parts in (
        ([[1]] * 5, 3),
        ([whole, whole, whole], 3),
        ([half, half, half, half], 2),
        ([half, [*half, 5], half], 3),
    ):
        assert all(len(context) <= CONTEXT_LENGTH for context in contexts)
        choices = [TokenChoice(values[i], context, PENALISED, 0) for i, context in enumerate(contexts)]
        expected, logits = begin_choices(choices).outcomes(), on_device(values, num_rows=2)
        before = gpu.counts
        started = begin_choices(far(choices, logits, range(len(choices))))
        assert not started.is_on_device, "some results are gone when others are chosen"
        assert started.outcomes() == expected
        assert (gpu.counts - before).waits == num_parts, contexts


def test_masks_and_ranks_beyond_the_memory_wait_for_those_before_them(gpu: Counted) -> None:
    """There is memory for the masks of two rows, and for as many likeliest tokens as one row may want."""
    vocab = MOST_RANKED + 3
    values = np.random.default_rng(0).normal(size=(4, vocab)).astype(np.float32)
    ranked, some = replace(SAMPLED, logprobs=MOST_RANKED), SomeTokens(3, vocab)
    wanted = [TokenChoice(row, [1], ranked, 0) for row in values]
    masked = [TokenChoice(row, [1], SAMPLED, 0, constraint=some) for row in values]
    for choices, num_parts in ((wanted, 4), (masked, 2), ([masked[0], wanted[1], masked[2], wanted[3]], 2)):
        expected, logits = begin_choices(choices).outcomes(), on_device(values, num_rows=2)
        before = gpu.counts
        assert begin_choices(far(choices, logits, range(len(choices)))).outcomes() == expected
        assert (gpu.counts - before).waits == num_parts


def test_the_device_learns_of_a_mask_in_the_one_copy_and_gives_ranks_in_one_more(gpu: Counted) -> None:
    values = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    logits, some = on_device(values), SomeTokens(2, 40)
    masked = [TokenChoice(logits[row], [1], SAMPLED, 0, constraint=some) for row in range(3)]
    for params, num_downloads in ((SAMPLED, 1), (replace(SAMPLED, logprobs=2), 2)):
        before = gpu.counts
        begin_choices([replace(each, params=params) for each in masked]).outcomes()
        assert gpu.counts - before == Counts(launches=1, uploads=1, waits=1, downloads=num_downloads)


def test_blocks_that_were_missed_are_an_error_of_the_device(
    gpu: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has three places, and its limits say four. The next choice goes well."""
    values = np.random.default_rng(0).normal(size=(1, 4 * 2048)).astype(np.float32)
    logits = on_device(values)
    choice = TokenChoice(logits[0], [3], SAMPLED, 0)
    limits = gpu.device.limits
    monkeypatch.setattr(gpu.device, "limits", replace(limits, num_processors=4))
    (outcome,) = begin_choices([choice]).outcomes()
    assert isinstance(outcome, DeviceError)
    assert "position 1: the GPU has not run all blocks" in str(outcome)
    monkeypatch.setattr(gpu.device, "limits", limits)
    assert begin_choices([choice]).outcomes() == begin_choices([replace(choice, logits=values[0])]).outcomes()


def test_a_damaged_row_is_a_fault_of_its_own(gpu: Counted) -> None:
    values = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32)
    values[1, 7], values[3] = np.nan, np.inf
    values[2] = np.finfo(np.float32).max
    boosted = replace(PENALISED, repetition_penalty=0.5)
    choices = [
        TokenChoice(row, [3, 4], params, 0)
        for row, params in zip(values, [SAMPLED, boosted] * 3, strict=False)
    ]
    logits = on_device(values)
    before = gpu.counts
    outcomes = begin_choices(far(choices, logits, range(5))).outcomes()
    assert gpu.counts - before == Counts(1, uploads=1, waits=1, downloads=1), "no logits are brought for it"
    assert shown(outcomes) == shown(begin_choices(choices).outcomes())
    assert [isinstance(each, GenerationFault) for each in outcomes] == [False, True, False, True, False]
    assert "1 of 40 logits at position 2 are not finite;" in str(outcomes[1])


@pytest.mark.usefixtures("gpu")
def test_logits_are_brought_by_rows_and_refused_after_another_step() -> None:
    values = np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32)
    logits = on_device(values)
    assert np.array_equal(np.asarray(logits), values)
    assert np.array_equal(np.asarray(logits[2:5]), values[2:5])
    assert np.array_equal(np.asarray(logits[2:5][1]), values[3])
    assert np.array_equal(np.asarray(logits[-1]), values[5])
    assert np.array_equal(logits.step.bring([5, 0, 1, 3]), values[[5, 0, 1, 3]])
    gone = replace(logits, step=replace(logits.step, is_current=lambda: False))
    with pytest.raises(RuntimeError, match="another step"):
        np.asarray(gone[0])
    with pytest.raises(RuntimeError, match="another step"):
        begin_choices([TokenChoice(gone[0], [1], GREEDY, 0)]).outcomes()
