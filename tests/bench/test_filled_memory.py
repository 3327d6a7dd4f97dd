"""Memory that a benchmark takes so that a program finds no more than a budget."""

import pytest

from bench import memory_limit
from bench.memory_limit import SLACK_BYTES, available_bytes, filled_memory

MIB = 2**20


def test_all_but_a_budget_is_taken_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    full = memory_limit.np.full

    def noted(size: int, value: int, kind: type) -> object:
        taken.append(size)
        return full(size, value, kind)

    monkeypatch.setattr(memory_limit, "available_bytes", lambda: SLACK_BYTES + 100 * MIB)
    monkeypatch.setattr(memory_limit, "_PIECE_BYTES", 7 * MIB)
    monkeypatch.setattr(memory_limit.np, "full", noted)
    with filled_memory(79 * MIB):
        assert sum(taken) == 21 * MIB
        assert max(taken) == 7 * MIB
    with pytest.raises(ValueError, match="are available"), filled_memory(101 * MIB):
        pass


def test_what_is_available_is_what_the_kernel_says() -> None:
    assert MIB < available_bytes() < 2**50
