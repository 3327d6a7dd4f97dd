"""Who takes part in a step: everybody some time, nobody beyond what there is, and short prompts first."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coldstream.engine.scheduler import QUANTUM, Scheduler

MAX_RUNNING, NUM_ROWS = 4, 96


@dataclass
class Answer:
    prompt_left: int
    tokens_left: int

    def take(self, num_rows: int) -> bool:
        """Computes rows of it; whether that was the last token."""
        self.prompt_left = max(0, self.prompt_left - num_rows)
        self.tokens_left -= self.prompt_left == 0
        return not self.tokens_left


def always(key: int) -> bool:
    return True


def every_row(num_decoding: int, wanted: object) -> int:
    return NUM_ROWS


def filled(wanted: dict[int, int], max_running: int = 64, num_rows: int = NUM_ROWS) -> Scheduler:
    """All answers run."""
    scheduler = Scheduler(max_running, num_rows)
    for key in wanted:
        scheduler.add(key)
        scheduler.admit(key)
    return scheduler


wants = st.lists(st.integers(1, 200), min_size=1, max_size=40).map(lambda each: dict(enumerate(each)))


def test_what_prompts_want_is_known_to_who_says_how_many_rows_they_get() -> None:
    asked = []

    def most(num_decoding: int, wanted: Sequence[int]) -> int:
        asked.append((num_decoding, sorted(wanted)))
        return 7

    wanted = {0: 1, 1: 40, 2: 1, 3: 900}
    shares = filled(wanted).share(wanted, most)
    assert asked == [(2, [40, 900])]
    assert sum(shares.values()) == 2 + 7


@given(wants, st.integers(1, 200), st.integers(0, 300))
def test_a_step_has_no_more_rows_than_it_takes_nor_than_are_wanted(
    wanted: dict[int, int], num_rows: int, most: int
) -> None:
    shares = filled(wanted, num_rows=num_rows).share(wanted, lambda num_decoding, rows: most)
    assert shares
    assert all(1 <= shares[key] <= wanted[key] for key in shares)
    assert sum(shares.values()) <= num_rows
    decoding = [key for key in shares if wanted[key] == 1]
    prompts = [key for key in shares if wanted[key] > 1]
    if prompts:
        assert sum(shares[key] for key in prompts) <= max(1, most)
    assert len(decoding) + len(prompts) == len(shares)


@given(wants)
def test_every_answer_that_decodes_has_a_row_of_each_step(wanted: dict[int, int]) -> None:
    shares = filled(wanted).share(wanted, every_row)
    assert all(shares[key] == 1 for key, want in wanted.items() if want == 1)


@pytest.mark.parametrize(("num_rows", "free"), [(16, 8), (2 * QUANTUM, QUANTUM), (4 * QUANTUM, QUANTUM)])
def test_rows_are_kept_free_of_answers_where_prompts_want_them(num_rows: int, free: int) -> None:
    wanted = dict.fromkeys(range(5 * QUANTUM), 1)
    assert len(filled(wanted, num_rows=num_rows).share(wanted, every_row)) == num_rows
    wanted[len(wanted)] = 5000
    shares = filled(wanted, num_rows=num_rows).share(wanted, every_row)
    assert shares.pop(len(wanted) - 1) == free
    assert sum(shares.values()) == num_rows - free


@given(st.lists(st.integers(2, 500), min_size=1, max_size=NUM_ROWS // QUANTUM))
def test_short_prompts_go_first_and_no_row_is_unused(wants: list[int]) -> None:
    wanted = dict(enumerate(wants))
    shares = filled(wanted).share(wanted, every_row)
    assert sum(shares.values()) == min(NUM_ROWS, sum(wants))
    assert all(shares[key] >= min(want, QUANTUM) for key, want in wanted.items())
    favoured = [key for key, want in wanted.items() if shares[key] > min(want, QUANTUM)]
    shorter = {other for key in favoured for other, want in wanted.items() if want < wanted[key]}
    assert all(shares[key] == wanted[key] for key in shorter)


def test_a_prompt_is_done_in_the_step_after_its_arrival_beside_a_long_one() -> None:
    wanted = {0: 5000, 1: NUM_ROWS - QUANTUM}
    assert filled(wanted).share(wanted, every_row) == {0: QUANTUM, 1: NUM_ROWS - QUANTUM}


@given(st.lists(st.integers(2, QUANTUM), min_size=1, max_size=60))
def test_short_prompts_leave_no_row_unused_either(wants: list[int]) -> None:
    wanted = dict(enumerate(wants))
    shares = filled(wanted).share(wanted, every_row)
    assert sum(shares.values()) >= min(NUM_ROWS - QUANTUM, sum(wants))


@given(st.integers(1, 60), st.integers(1, 64), st.integers(2, 40))
def test_sc01_no_running_answer_is_left_out_for_long(
    num_decoding: int, num_prompts: int, num_rows: int
) -> None:
    """Even with fewer rows than answers: each is served again within as many steps as there are answers."""
    wanted = {key: 1 if key < num_decoding else 1000 for key in range(num_decoding + num_prompts)}
    scheduler = filled(wanted, max_running=200, num_rows=num_rows)
    last = dict.fromkeys(wanted, 0)
    for step in range(1, 300):
        shares = scheduler.share(wanted, lambda num_decoding, rows: 1)
        scheduler.served(shares)
        last |= dict.fromkeys(shares, step)
        assert all(step - at <= 2 * len(wanted) + 1 for at in last.values())


@given(
    st.lists(st.integers(1, 60), min_size=8, max_size=8), st.lists(st.integers(0, 9), min_size=8, max_size=8)
)
def test_sc01_short_prompts_beside_one_of_32k_rows_are_done_in_the_step_that_they_are_alone(
    shorts: list[int], gaps: list[int]
) -> None:
    """Whenever they come; and the long one gets on in every step, too."""
    scheduler, num_rows = Scheduler(64, 512), 512
    left = {0: 32_000}
    arrivals = dict(enumerate(zip(accumulate(gaps), shorts, strict=True), 1))
    scheduler.add(0)
    for step in range(sum(gaps) + 1):
        new = [key for key, (at, _) in arrivals.items() if at == step]
        for key in new:
            scheduler.add(key)
            left[key] = arrivals[key][1]
        while (admitted := scheduler.candidate(always)) is not None:
            scheduler.admit(admitted)
        wanted = {key: left[key] or 1 for key in scheduler.running}
        shares = scheduler.share(wanted, lambda num_decoding, rows: num_rows - num_decoding)
        scheduler.served(shares)
        assert shares.keys() == wanted.keys()
        assert all(shares[key] == left[key] for key in new)
        for key, count in shares.items():
            left[key] = max(0, left[key] - count)


# What comes after so many steps: rows of a prompt, tokens, priority, namespace.
streams = st.lists(
    st.tuples(
        *(st.integers(0, 30), st.integers(1, 64), st.integers(1, 5)),
        *(st.integers(-1, 1), st.sampled_from("abc")),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.sharded(of="models on the CPU")
@settings(max_examples=12, deadline=None)
@given(streams)
def test_sc01_nobody_starves_in_ten_thousand_steps_of_any_arrivals(
    stream: list[tuple[int, int, int, int, str]],
) -> None:
    """Each running answer gets on every so many steps, and each waiting one is admitted in time.

    What comes is repeated for ever, as long as there are not more than `crowd` answers under way.
    """
    scheduler, crowd = Scheduler(MAX_RUNNING, NUM_ROWS), 20
    # Four portions of a prompt, each in turn with those of the other prompts, and then the tokens.
    longest_run = 4 * MAX_RUNNING + 5
    longest_wait = 2 * 256 + 2 * crowd * longest_run
    answers: dict[int, Answer] = {}
    moved: dict[int, int] = {}  # step in which an answer came, was admitted or was served
    arrivals, next_at, num_added = cycle(stream), 0, 0
    for step in range(10_000):
        while next_at <= step and len(answers) < crowd:
            gap, prompt, tokens, priority, namespace = next(arrivals)
            answers[num_added], moved[num_added] = Answer(prompt, tokens), step
            scheduler.add(num_added, priority=priority, owner=namespace)
            num_added, next_at = num_added + 1, step + gap
        while (key := scheduler.candidate(always)) is not None:
            scheduler.admit(key)
            moved[key] = step
        running = scheduler.running
        wanted = {key: answers[key].prompt_left or 1 for key in running}
        shares = scheduler.share(wanted, lambda num_decoding, rows: 20) if wanted else {}
        scheduler.served(shares)
        for key, count in shares.items():
            moved[key] = step
            if answers[key].take(count):
                del answers[key], moved[key]
                scheduler.remove(key)
        assert all(step - moved[key] <= MAX_RUNNING for key in running if key in moved)
        assert all(step - at <= longest_wait for at in moved.values())
    assert num_added > 300


@given(st.lists(st.tuples(st.integers(-3, 3), st.sampled_from("abc")), min_size=1, max_size=30))
def test_the_order_is_that_of_arrival_within_a_priority_and_a_namespace(given: list[tuple[int, str]]) -> None:
    scheduler = Scheduler(64, NUM_ROWS)
    for key, (priority, namespace) in enumerate(given):
        scheduler.add(key, priority=priority, owner=namespace)
    order = []
    while (next_key := scheduler.candidate(always)) is not None:
        scheduler.admit(next_key)
        order.append(next_key)
    assert sorted(order) == list(range(len(given)))
    for namespace in "abc":
        own = [key for key in order if given[key][1] == namespace]
        assert own == sorted(own, key=lambda key: (-given[key][0], key))


def test_sc02_one_key_that_floods_the_queue_leaves_another_its_share() -> None:
    scheduler = Scheduler(2, NUM_ROWS)
    for key in range(1000):
        scheduler.add(key, owner="flood")
    for _ in range(2):
        scheduler.admit(scheduler.candidate(always) or 0)
    scheduler.add(1000, owner="other")
    scheduler.remove(0)
    assert scheduler.candidate(always) == 1000


def test_a_low_priority_is_not_starved() -> None:
    """High ones that keep coming overtake it for some time only."""
    scheduler = Scheduler(1, NUM_ROWS)
    scheduler.add(0, priority=-1)
    for key in range(1, 2000):
        scheduler.add(key, priority=1)
        admitted = scheduler.candidate(always)
        if admitted == 0:
            assert key > 256
            return
        assert admitted is not None
        scheduler.admit(admitted)
        scheduler.served({admitted: 1})
        scheduler.remove(admitted)
    raise AssertionError("the answer of low priority never ran")


def test_an_answer_that_is_not_ready_lets_others_pass() -> None:
    scheduler = Scheduler(4, NUM_ROWS)
    for key in range(3):
        scheduler.add(key)
    scheduler.admit(0)
    assert scheduler.candidate(lambda key: key != 1) == 2
    assert scheduler.candidate(always) == 1


def test_memory_is_taken_from_the_latest_and_never_from_the_first() -> None:
    scheduler = filled({0: 1, 1: 1, 2: 1})
    assert [scheduler.preempt() for _ in range(3)] == [2, 1, None]
    assert scheduler.running == [0]
    assert [scheduler.candidate(always)] == [1]


class Served(RuleBasedStateMachine):
    """Any order of arrivals, cancels and lost memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(MAX_RUNNING, NUM_ROWS)
        self.answers: dict[int, Answer] = {}
        self.num_added = 0

    @rule(prompt=st.integers(1, 300), tokens=st.integers(1, 5), priority=st.integers(-1, 1))
    def add(self, prompt: int, tokens: int, priority: int) -> None:
        self.answers[self.num_added] = Answer(prompt, tokens)
        self.scheduler.add(self.num_added, priority=priority, owner=str(self.num_added % 2))
        self.num_added += 1

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.answers)))
        del self.answers[key]
        self.scheduler.remove(key)

    @rule()
    def lose_memory(self) -> None:
        first = self.scheduler.running[:1]
        preempted = self.scheduler.preempt()
        assert self.scheduler.running[:1] == first
        if preempted is not None:
            self.answers[preempted].prompt_left += 3

    @rule()
    def step(self) -> None:
        self.take_step()

    def take_step(self) -> None:
        while (key := self.scheduler.candidate(always)) is not None:
            self.scheduler.admit(key)
        wanted = {key: self.answers[key].prompt_left or 1 for key in self.scheduler.running}
        assert bool(wanted) == bool(self.answers), "there is a step as long as there are answers"
        if not wanted:
            return
        shares = self.scheduler.share(wanted, lambda num_decoding, rows: 20)
        self.scheduler.served(shares)
        assert shares
        for key, count in shares.items():
            if self.answers[key].take(count):
                del self.answers[key]
                self.scheduler.remove(key)

    @invariant()
    def everybody_runs_or_waits(self) -> None:
        running = self.scheduler.running
        assert len(set(running)) == len(running) <= MAX_RUNNING
        assert len(running) + self.scheduler.num_waiting == len(self.answers)

    def teardown(self) -> None:
        for _ in range(20 * len(self.answers) + 1):
            self.take_step()
        assert not self.answers, "all are served in the end"


TestServed = Served.TestCase
TestServed.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_who_has_nothing_that_runs_is_next_though_it_is_late() -> None:
    scheduler = Scheduler(3, NUM_ROWS)
    for key, owner in enumerate(("busy", "busy", "busy", "other")):
        scheduler.add(key, owner=owner)
    scheduler.admit(0)
    late = {1, 3}
    assert scheduler.candidate(is_late=late.__contains__) == 3
    scheduler.admit(3)
    assert scheduler.candidate(is_late=late.__contains__) == 2, "of an owner the late come last"
