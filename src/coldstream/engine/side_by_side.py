"""The answers to a list of prompts, computed together: each step has rows of as many sequences as fit, and
reads weights once for all of them.

Each answer is the same as if computed alone, as a row's bits do not depend on its neighbours. Knows runners,
tokens and text, not threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coldstream import kvcache
from coldstream.decoding import AnyLogits, Choice, Chosen, Continuation, Outcome, choose_tokens
from coldstream.engine.batching import Need, Room, next_turn, share_rows
from coldstream.engine.generation import Answer, Request, completion
from coldstream.engine.grammar import Grammars
from coldstream.engine.live_sequence import LiveSequence, num_live_prefix
from coldstream.engine.request import Piece, RequestOutput
from coldstream.errors import ColdstreamError
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kvcache import Batch, Segment
from coldstream.models.runner import ModelRunner


def generate_side_by_side(
    requests: Sequence[Request],
    live: LiveSequence,
    runner: ModelRunner,
    tokenizer: Tokenizer,
    grammars: Grammars,
    between_steps: Callable[[], None],
) -> list[RequestOutput]:
    """All answers to each of `requests`, in order. `live`, of `runner`, then holds the last answer.

    An error of one answer, such as that of a logits processor, is raised once the answers before it are done,
    so that it is always that of the first prompt with an error. Other errors, and those of `between_steps`,
    are raised at once. After an error there are no sequences, and `live` is empty.
    """
    with _SideBySide(requests, live, runner, tokenizer, grammars) as steps:
        while steps.unfinished:
            steps.step()
            between_steps()
        return steps.outputs()


@dataclass(frozen=True, eq=False)
class _Held:
    """A kept sequence in the runner's memory, and its tokens."""

    order: int  # of its answer; −1: of the live sequence before
    token_ids: Sequence[int]
    sequence: kvcache.Sequence


class _Job:
    """An unfinished answer."""

    def __init__(self, order: int, request: Request, leader: "_Job | None") -> None:
        """order: among all answers. leader: the first answer to the same prompt; None for that itself."""
        self.order = order
        self.request = request
        self.pieces: list[Piece] = []
        self.sequence: kvcache.Sequence | None = None
        self.answer: Answer | None = None  # from its first step on
        self.num_reused = 0
        self.is_finished = False
        self._leader = leader
        self._tokens = Continuation(
            request.prompt_token_ids, end_ids=request.all_end_ids, max_tokens=request.max_tokens
        )

    @property
    def token_ids(self) -> list[int]:
        """The prompt and all tokens chosen so far."""
        return self._tokens.ids

    @property
    def num_computed(self) -> int:
        return 0 if self.sequence is None else self.sequence.length

    @property
    def need(self) -> Need:
        leader = self._leader
        is_waiting = leader is not None and not leader.is_finished and leader.num_computed < leader.cut
        return Need(len(self.token_ids), self.num_computed, self.cut, is_waiting)

    @property
    def cut(self) -> int:
        """Where other answers branch off: before the prompt's last token, whose logits they need too."""
        is_shared = self._leader is None and self.request.params.n > 1
        return len(self.request.prompt_token_ids) - 1 if is_shared else 0

    def choice(self, logits: AnyLogits) -> Choice:
        """The `Choice` of the next token from the logits [vocab] after all tokens."""
        assert self.answer is not None
        return self.answer.chooser.choice(logits, self.token_ids)

    def accept(self, chosen: Chosen, runner: ModelRunner) -> None:
        """Appends the next token, which may finish the answer."""
        assert self.answer is not None
        self._tokens.append(chosen.token_id, runner.spec.vocab_size)
        piece = self.answer.push(chosen)
        if not self.answer.has_stopped:
            self.pieces.append(piece)
        if self.answer.has_stopped or self._tokens.has_ended:
            self.is_finished = True
            self.pieces.append(self.answer.last_piece("length", self.num_reused, runner.expert_uses))


class _SideBySide:
    """The state between two steps. As a context manager it frees all memory, except that of the last answer
    if it ends without an exception.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        live: LiveSequence,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        grammars: Grammars,
    ) -> None:
        self._runner = runner
        self._live = live
        self._tokenizer, self._grammars = tokenizer, grammars
        self._requests = requests
        size = runner.cache_size
        self._room = Room(size.num_blocks, size.num_states, runner.chunk_size)
        self._jobs: list[_Job] = []
        for request in requests:
            leader = None
            for answer in request.answers():
                self._jobs.append(_Job(len(self._jobs), answer, leader))
                leader = leader or self._jobs[-1]
        self.unfinished = list(self._jobs)  # in order
        self._kept: list[_Held] = []  # finished, in descending order
        self._error: ColdstreamError | None = None

    def __enter__(self) -> "_SideBySide":
        token_ids, sequence = self._live.hand_over()
        if token_ids:
            self._kept.append(_Held(-1, token_ids, sequence))
        else:
            self._runner.release(sequence)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for held in self._kept:
            if kind is None and held.order == len(self._jobs) - 1:
                self._live.hold(list(held.token_ids[: held.sequence.length]), held.sequence)
            else:
                self._runner.release(held.sequence)
        for job in self.unfinished:
            self._give_back(job)

    def step(self) -> None:
        """Compute one step and choose the tokens that follow from it."""
        first = self.unfinished[: self._room.num_sequences]  # no later one has a sequence
        lengths = [held.sequence.length for held in self._kept]
        turn = next_turn([job.need for job in first], lengths, self._room)
        running = first[: turn.num_running]
        for job in running:
            if job.sequence is None:
                self._begin(job, first)
        # Released only after branching, which then copies nothing.
        for held in self._kept[turn.num_kept :]:
            self._runner.release(held.sequence)
        del self._kept[turn.num_kept :]
        for job in first[turn.num_running :]:
            self._give_back(job)
        counts = share_rows([job.need for job in running], self._room.num_rows)
        segments = tuple(_segment(job, count) for job, count in zip(running, counts, strict=True))
        all_logits = self._runner.step(Batch(segments))
        due = [(job, logits[0]) for job, logits in zip(running, all_logits, strict=True) if len(logits)]
        outcomes = choose_tokens([job.choice(logits) for job, logits in due])
        for (job, _), outcome in zip(due, outcomes, strict=True):
            if not self._accept(job, outcome):
                break

    def outputs(self) -> list[RequestOutput]:
        """The outputs of all requests, once they are finished. Raises the error of the first that has one."""
        if self._error is not None:
            raise self._error
        jobs = iter(self._jobs)
        return [
            RequestOutput(
                request.prompt,
                request.prompt_token_ids,
                tuple(completion(index, next(jobs).pieces) for index in range(request.params.n)),
            )
            for request in self._requests
        ]

    def _accept(self, job: _Job, outcome: Outcome) -> bool:
        """Takes an outcome. False for an error, after which later jobs are useless."""
        try:
            if not isinstance(outcome, Chosen):
                raise outcome
            job.accept(outcome, self._runner)
        except ColdstreamError as error:
            self._error = error
            place = self.unfinished.index(job)
            for useless in self.unfinished[place:]:
                self._give_back(useless)
            del self.unfinished[place:]
            return False
        if job.is_finished:
            assert job.sequence is not None
            self.unfinished.remove(job)
            self._kept.append(_Held(job.order, job.token_ids, job.sequence))
            self._kept.sort(key=lambda held: -held.order)
        return True

    def _begin(self, job: _Job, others: Sequence[_Job]) -> None:
        """Gives the job a sequence, branched off the one that shares most of its tokens."""
        started = [_Held(each.order, each.token_ids, each.sequence) for each in others if each.sequence]
        best, num_best = None, 0
        for held in (*self._kept, *started):
            count = num_live_prefix(held.token_ids[: held.sequence.length], job.token_ids)
            if count > num_best:
                best, num_best = held.sequence, count
        job.sequence = self._runner.new_sequence() if best is None else self._runner.branch(best)
        if job.answer is None:
            constraint = self._grammars.constraint(job.request)
            job.answer = Answer(job.request, self._tokenizer, self._runner.expert_uses, constraint)
            job.num_reused = num_best

    def _give_back(self, job: _Job) -> None:
        """Frees the job's sequence; its tokens stay."""
        if job.sequence is not None:
            sequence, job.sequence = job.sequence, None
            self._runner.release(sequence)


def _segment(job: _Job, count: int) -> Segment:
    """The next rows of the job. Only logits after its last token are wanted."""
    assert job.sequence is not None
    start = job.num_computed
    is_last = start + count == len(job.token_ids)
    return Segment(job.sequence, job.token_ids[start : start + count], None, None if is_last else ())
