"""Who takes part in a step: within the room there is, in order, and each one some time."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from coldstream.engine.batching import Need, Room, next_turn, share_rows
from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache import num_blocks_of

LONGEST = 4 * BLOCK_POSITIONS

lengths = st.integers(1, LONGEST)
rooms = st.builds(Room, st.integers(4, 9), st.integers(1, 6), st.integers(1, 600))


@st.composite
def need_lists(draw: st.DrawFn) -> list[Need]:
    needs = []
    for length in draw(st.lists(lengths, min_size=1, max_size=9)):
        num_computed = draw(st.integers(0, length - 1))
        cut = draw(st.integers(0, length - 1))
        needs.append(Need(length, num_computed, cut, bool(needs) and draw(st.booleans())))
    return needs


def blocks(lengths: list[int]) -> int:
    return sum(num_blocks_of(length) for length in lengths)


@given(need_lists(), st.lists(lengths, max_size=6), rooms)
def test_as_many_take_part_as_there_is_room_for(needs: list[Need], kept: list[int], room: Room) -> None:
    turn = next_turn(needs, kept, room)
    running, behind = needs[: turn.num_running], needs[turn.num_running :]
    lengths = [need.length for need in running]
    assert 1 <= len(running) <= min(room.num_sequences, room.num_rows)
    assert blocks(lengths) <= room.num_blocks
    assert not any(need.is_waiting for need in running)
    if behind and not behind[0].is_waiting and len(running) < min(room.num_sequences, room.num_rows):
        assert blocks([*lengths, behind[0].length]) > room.num_blocks
    all_lengths = lengths + kept[: turn.num_kept]
    assert blocks(all_lengths) <= room.num_blocks
    assert len(all_lengths) <= room.num_sequences
    if turn.num_kept < len(kept) and len(all_lengths) < room.num_sequences:
        assert blocks([*all_lengths, kept[turn.num_kept]]) > room.num_blocks


@given(need_lists(), st.integers(9, 600))
def test_every_sequence_has_a_row_and_the_first_ones_have_the_others(
    running: list[Need], num_rows: int
) -> None:
    shares = share_rows(running, num_rows)
    ends = [need.cut if need.num_computed < need.cut else need.length for need in running]
    wanted = [end - need.num_computed for end, need in zip(ends, running, strict=True)]
    assert all(1 <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) == min(num_rows, sum(wanted))
    is_cut_short = [share < want for share, want in zip(shares, wanted, strict=True)]
    if any(is_cut_short):
        assert all(share == 1 for share in shares[is_cut_short.index(True) + 1 :])


@dataclass
class Simulated:
    """A sequence whose answer has so many tokens, and that has a shared beginning if it leads others."""

    length: int
    num_left: int
    cut: int = 0
    leader: "Simulated | None" = None
    num_computed: int = 0

    @property
    def need(self) -> Need:
        leader = self.leader
        is_waiting = leader is not None and leader.num_left > 0 and leader.num_computed < leader.cut
        return Need(self.length, self.num_computed, self.cut, is_waiting)


@st.composite
def simulated_lists(draw: st.DrawFn) -> list[Simulated]:
    every = []
    for length in draw(st.lists(st.integers(1, LONGEST - 1), min_size=1, max_size=6)):
        answers = draw(st.lists(st.integers(1, min(300, LONGEST - length)), min_size=1, max_size=3))
        first = Simulated(length, answers[0], length - 1 if len(answers) > 1 else 0)
        every += [first, *(Simulated(length, answer, 0, first) for answer in answers[1:])]
    return every


@given(simulated_lists(), rooms)
def test_all_are_finished_and_the_first_is_never_kept_waiting(every: list[Simulated], room: Room) -> None:
    unfinished = list(every)
    while unfinished:
        running = unfinished[: next_turn([each.need for each in unfinished], [], room).num_running]
        for each in unfinished[len(running) :]:
            each.num_computed = 0
        before = [each.num_computed for each in running]
        counts = share_rows([each.need for each in running], room.num_rows)
        for each, count in zip(running, counts, strict=True):
            each.num_computed += count
            if each.num_computed == each.length:
                each.num_left -= 1
                each.length += 1
        assert all(each.num_computed > old for each, old in zip(running, before, strict=True))
        assert running[0] is unfinished[0]
        unfinished = [each for each in unfinished if each.num_left]
