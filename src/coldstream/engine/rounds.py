"""Rounds that a device drafts and accepts by itself, of one sequence.

What a text leaves is what the plain loop leaves. If it ends where the device did not expect it, rounds in
flight have kept more: then the sequence goes back to where the rounds began, and computes the tokens that
were wanted once more, as a prompt.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from coldstream import kvcache
from coldstream.decoding import Speculation
from coldstream.decoding.drafters import DeviceRounds, RoundDrafter, with_rounds
from coldstream.kernels.rounds.reference import Accepted, RoundText
from coldstream.models.runner import ModelRunner


def begin_rounds(
    runner: ModelRunner,
    sequence: kvcache.Sequence,
    speculation: Speculation,
    text: RoundText,
    context: Sequence[int],
    hold: Callable[[Sequence[int]], None],
) -> "SequenceRounds | None":
    """Rounds of a text, whose tokens so far are `context`, all but the last in `sequence`.

    hold: see `SequenceRounds`. None, with nothing changed, where the device cannot draft by itself: not a
    GPU with all experts and a drafter, or no room for a second recurrent state, to which the sequence
    goes back if it ends elsewhere. Raises DeviceError, with the sequence empty.
    """
    drafter = with_rounds(speculation.drafter)
    if drafter is None:
        return None
    before = runner.checkpoint(sequence)
    device = drafter.begin_rounds(context, sequence, text)
    if device is None:
        runner.drop(sequence, before)
        return None
    return SequenceRounds(runner, sequence, drafter, device, before, text.root, hold)


class SequenceRounds:
    """Implements decoding's `Rounds`. After an exception, the sequence is empty."""

    def __init__(
        self,
        runner: ModelRunner,
        sequence: kvcache.Sequence,
        drafter: RoundDrafter,
        device: DeviceRounds,
        before: kvcache.Checkpoint,
        root: int,
        hold: Callable[[Sequence[int]], None],
    ) -> None:
        """before: the last checkpoint of the sequence, made where the rounds begin. hold: is told which
        tokens from the root on the sequence has in the end.
        """
        self._runner, self._sequence, self._drafter, self._device = runner, sequence, drafter, device
        self._before, self._hold = before, hold
        self._token_ids = [root]  # and those of the rounds that were taken
        self.has_failed = False

    def launch(self, num_nodes: int) -> None:
        """See `Rounds`."""
        with self._whole_or_empty():
            self._device.launch(num_nodes)

    def take(self) -> Accepted:
        """See `Rounds`."""
        with self._whole_or_empty():
            accepted = self._device.take()
        self._token_ids += accepted.token_ids
        return accepted

    def end(self, num_kept: int) -> None:
        """See `Rounds`. Nothing to do after an exception."""
        if self.has_failed:
            return
        with self._whole_or_empty():
            num_held, state = self._device.end()
            self._drafter.end_rounds(num_held, state)
            wanted = self._token_ids[:num_kept]
            if num_held > num_kept:
                self._runner.restore(self._sequence, self._before)
                if wanted:
                    self._runner.extend(self._sequence, wanted)
                self._drafter.cut(self._sequence.length)
            self._runner.drop(self._sequence, self._before)
        self._hold(wanted)

    @contextmanager
    def _whole_or_empty(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.has_failed = True
            self._runner.clear(self._sequence)
            self._drafter.cut(0)
            raise
