"""SlotPool: the lowest free slot is taken first, whatever was freed before."""

from hypothesis import given
from hypothesis import strategies as st

from coldstream.experts.slots.slot_pool import SlotPool


@given(size=st.integers(1, 12), data=st.data())
def test_the_lowest_free_slot_is_acquired(size: int, data: st.DataObject) -> None:
    """High slots are the first that a smaller pool gives up, so they are the last to be filled."""
    pool = SlotPool(1, size)
    free, owned = set(range(size)), set[int]()
    for expert in range(data.draw(st.integers(1, 30), "events")):
        if owned and (not free or data.draw(st.booleans(), "release")):
            index = data.draw(st.sampled_from(sorted(owned)), "slot")
            pool.release(index)
            owned.remove(index)
            free.add(index)
        else:
            index = pool.acquire(expert)
            assert index == min(free)
            free.remove(index)
            owned.add(index)
        assert pool.num_free == len(free)
