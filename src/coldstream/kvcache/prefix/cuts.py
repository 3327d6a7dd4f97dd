"""Where the state within a prompt is left, so that a prefix of it can be kept. Pure: positions only.

Each cut costs a recurrent state, and a step that ends there where it cannot pass over it; so there are few.
"""

from collections.abc import Iterable

from coldstream.kernels.ops import BLOCK_POSITIONS

MIN_GAP = 16  # tokens that are computed again sooner than a state of them is worth its memory


def choose_cuts(
    start: int,
    length: int,
    *,
    parting: int,
    borders: Iterable[int],
    max_replay: int,
    limit: int,
    comes_again: bool = True,
) -> tuple[int, ...]:
    """At most `limit` positions, ascending, of a prompt of `length` tokens of which `start` are held.

    All lie between `start` and `length`, as a prompt needs its last token computed. parting: how many of the
    first tokens other prompts began with. borders: ends of a system prompt, of tools, of messages.
    comes_again: whether a later prompt may begin with all of this one. As far as the limit allows, no cut is
    more than `max_replay` tokens behind the one before, and one is at the end if the prompt comes again. If
    there are too many, the prefix that other prompts have comes first, then that up to the last border, that
    of the whole prompt, that up to the first border, and the other borders in order.
    """
    end = length - 1
    inside = sorted({border for border in borders if start < border <= end})
    wanted = [(min(parting, end), MIN_GAP)]
    wanted += [(border, MIN_GAP) for border in inside[-1:]]
    if comes_again:
        wanted.append((end, MIN_GAP))
    wanted += [(border, MIN_GAP) for border in inside[:1]]
    wanted += [(border, BLOCK_POSITIONS) for border in inside[1:-1]]
    cuts: list[int] = []
    for position, gap in wanted:
        if (
            len(cuts) < limit
            and position > start
            and all(abs(position - each) >= gap for each in (start, *cuts))
        ):
            cuts.append(position)
    cuts.sort()
    spacing = max_replay
    while len(between := _between(start, cuts, spacing)) > limit - len(cuts):
        spacing *= 2
    return tuple(sorted([*cuts, *between]))


def _between(start: int, cuts: list[int], spacing: int) -> list[int]:
    """Positions between `start` and the last cut such that no gap is longer than `spacing`."""
    result: list[int] = []
    before = start
    for cut in cuts:
        while cut - before > spacing:
            # The end of a block, where it may be, as a sequence that goes on then copies no block.
            whole = (before + spacing) // BLOCK_POSITIONS * BLOCK_POSITIONS
            before = whole if whole > before else before + spacing
            result.append(before)
        before = cut
    return result
