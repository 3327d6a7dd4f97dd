"""What starting does to the collector of reference cycles."""

import gc
from collections.abc import Iterator

import pytest

from coldstream.garbage import starting


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Each test with a collector that looks at everything, also afterwards."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_while_a_program_starts() -> None:
    with starting():
        assert not gc.isenabled()
        with starting():
            pass
        assert not gc.isenabled(), "an inner start does not end the outer one"
    assert gc.isenabled()


def test_a_failed_start_collects_again() -> None:
    with pytest.raises(ValueError, match="no model"), starting():
        raise ValueError("no model")
    assert gc.isenabled()


def test_what_a_start_made_is_not_looked_at_again() -> None:
    with starting():
        made = [[number] for number in range(100)]
    assert gc.get_freeze_count() > len(made)
    young = {id(each) for each in gc.get_objects()}
    assert young.isdisjoint(map(id, made))


def test_a_caller_that_collects_nothing_is_left_alone() -> None:
    gc.disable()
    with starting():
        pass
    assert not gc.isenabled()
