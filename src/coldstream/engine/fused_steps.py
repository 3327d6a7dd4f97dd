"""Fused speculative steps: a device drafts, verifies and accepts by itself, for the one answer that runs.

A step is launched before the host has seen what the step before it gave. A step drafts a chain of tokens
and keeps what agrees with the tokens chosen after it (`kernels/fused/reference.py`). Each token is chosen
from the logits after exactly the tokens before it, so the tokens are those of plain decoding.

The device knows end tokens and the length of an answer. Where the host ends the answer otherwise, by a stop
string or a cancellation, steps in flight may have kept more tokens. Then the sequence goes back to the
checkpoint where the steps began, and computes the wanted tokens once more.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Final

from coldstream import kvcache
from coldstream.decoding import SampledToken
from coldstream.decoding.choice import no_token
from coldstream.decoding.drafters import FusedDrafter, FusedRun
from coldstream.decoding.fused_sizes import FusedSizes
from coldstream.engine.draft_follower import DraftFollower
from coldstream.engine.job import Job
from coldstream.kernels.fused.reference import FusedResult, FusedText
from coldstream.models.runner import ModelRunner

MOST_TOKENS: Final = 256  # after one checkpoint, as they may have to be computed once more
_IN_FLIGHT: Final = 2  # steps whose results the device keeps for the host

OnAccepted = Callable[[FusedResult, float], None]
"""Is told what came of a step, and how many seconds it took."""


class FusedSteps:
    """The fused steps of one job since the last checkpoint.

    Until `end` the job's sequence belongs to the device. After an exception of the device it is empty.
    """

    def __init__(
        self,
        runner: ModelRunner,
        job: Job,
        follower: DraftFollower,
        drafter: FusedDrafter,
        sizes: FusedSizes,
        on_accepted: OnAccepted,
    ) -> None:
        """follower: of the job, with `drafter`, behind all tokens but the last. `begin` has to follow."""
        self.job = job
        self._runner, self._follower, self._drafter = runner, follower, drafter
        self._sizes, self._on_accepted = sizes, on_accepted
        self._device: FusedRun | None = None
        self._before: kvcache.Checkpoint | None = None
        self._token_ids = [job.token_ids[-1]]  # the root, and what the steps gave
        self._num_kept = 0  # how many of these the answer keeps
        self._num_in_flight = 0
        self._last_time = 0.0  # when the last step had ended, or the first was launched
        self._captured_before = 0

    def begin(self, text: FusedText) -> bool:
        """Begins steps of `text`. False, with nothing changed, where the device has none for it.

        That is so without room for a second recurrent state. Raises DeviceError, with the sequence empty.
        """
        sequence = self._sequence
        with self._whole_or_empty():
            before = self._runner.checkpoint(sequence)
            device = self._drafter.begin_fused(self.job.token_ids, sequence, text)
        if device is None:
            self._runner.drop(sequence, before)
            return False
        self._device, self._before = device, before
        self._captured_before, self._last_time = self._runner.num_captured, time.perf_counter()
        self._sizes.start()
        return True

    @property
    def is_over(self) -> bool:
        """Whether no step is in flight, so that `end` has to follow."""
        return self._num_in_flight == 0

    def launch(self) -> None:
        """Launches steps, if any more pay, until as many are in flight as may be. Raises DeviceError."""
        assert self._device is not None
        while (
            self._num_in_flight < _IN_FLIGHT
            and self.job.num_left > self._num_in_flight
            and len(self._token_ids) <= MOST_TOKENS
            and not self._sizes.backs_off()
        ):
            with self._whole_or_empty():
                self._device.launch(self._sizes.next())
            self._num_in_flight += 1

    def take(self) -> Generator[SampledToken]:
        """Waits for the oldest step in flight and yields its tokens, which `Job.tokens` then has.

        Closing the iterator early is allowed; its other tokens count as not wanted. Raises DeviceError, and
        GenerationFault where no token can be chosen.
        """
        assert self._device is not None
        with self._whole_or_empty():
            accepted = self._device.take()
        self._num_in_flight -= 1
        self._token_ids += accepted.token_ids
        self._record(accepted)
        job, vocab_size = self.job, self._runner.spec.vocab_size
        for token_id in accepted.token_ids:
            job.tokens.append(token_id, vocab_size)
            self._num_kept += 1
            yield SampledToken(token_id)
        if accepted.fault:
            raise no_token(accepted.fault, vocab_size, len(job.token_ids))

    def end(self) -> None:
        """Waits for all steps in flight. The sequence then holds all tokens of the job but the last.

        Does nothing after an exception of the device, and a second time. Raises DeviceError.
        """
        device, self._device = self._device, None
        if device is None:
            return
        assert self._before is not None
        self._num_in_flight = 0
        with self._whole_or_empty():
            num_held, state = device.end()
            self._drafter.end_fused(num_held, state)
            wanted = self._token_ids[: self._num_kept]
            if num_held > len(wanted):
                self._runner.restore(self._sequence, self._before)
                if wanted:
                    self._runner.extend(self._sequence, wanted)
                self._drafter.truncate(self._sequence.length)
            self._runner.drop(self._sequence, self._before)
        self._follower.computed(wanted)

    @property
    def _sequence(self) -> kvcache.Sequence:
        assert self.job.sequence is not None, "a job without memory does not run"
        return self.job.sequence

    def _record(self, accepted: FusedResult) -> None:
        now, num_captured = time.perf_counter(), self._runner.num_captured
        seconds, self._last_time = now - self._last_time, now
        self._sizes.record(accepted, seconds, is_usual=num_captured == self._captured_before)
        self._captured_before = num_captured
        self._on_accepted(accepted, seconds)

    @contextmanager
    def _whole_or_empty(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._device = None
            self._num_in_flight = 0
            self._runner.clear(self._sequence)
            self._follower.forget()
            raise
