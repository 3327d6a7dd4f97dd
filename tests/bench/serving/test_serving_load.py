"""How the benchmark of a server interleaves numbers of clients, and what it says of them."""

import asyncio
from typing import Any

import pytest

from bench.serving import load
from bench.serving.load import NEW_TOKENS, Client, Meter, closed_loops, command, parser


class Played:
    """A client whose server answers at once, and refuses or loses some requests. Its clock is its own."""

    def __init__(self, statuses: tuple[int, ...] = (200,)) -> None:
        self.now, self.running, self.most, self.asked = 0.0, 0, 0, 0
        self.statuses = statuses
        self.most_of_loops: list[int] = []

    def cpu_s(self) -> tuple[float, float]:
        """Asked for at both ends of a loop, when no request runs."""
        assert not self.running
        self.most_of_loops += [self.most] if self.most else []
        self.most = 0
        return 2 * self.now, self.now / 2

    async def complete(self) -> tuple[int, float, int]:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.now += 0.25
        self.running -= 1
        status = self.statuses[self.asked % len(self.statuses)]
        self.asked += 1
        return status, 0.25, NEW_TOKENS if status == 200 else 0


def measured(client: Played, monkeypatch: pytest.MonkeyPatch, *counts: int, turns: int) -> dict[str, Any]:
    monkeypatch.setattr(load.time, "perf_counter", lambda: client.now)
    played: Any = client
    return asyncio.run(closed_loops(played, counts, 8.0, turns))


def test_numbers_of_clients_are_interleaved_and_begin_with_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Played()
    found = measured(client, monkeypatch, 1, 2, 4, turns=4)
    assert client.most_of_loops == [1, 2, 4, 2, 4, 1, 4, 1, 2, 1, 2, 4]
    assert list(found) == ["1", "2", "4"]
    for row in found.values():
        assert 8 <= row["seconds"] <= 8 + 4 * 0.25 * 4
        assert row["answered"] == row["seconds"] / 0.25
        assert row["tok_s"] == NEW_TOKENS * 4
        assert (row["server_cores"], row["client_cores"]) == (2, 0.5)


def test_what_is_refused_and_lost_is_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = measured(Played((200, 429, 0, 500)), monkeypatch, 1, turns=1).values()
    assert (row["answered"], row["refused"], row["lost"]) == (8, 8, 16)
    assert row["tok_s"] == NEW_TOKENS


def test_a_meter_adds_up_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = Played()
    monkeypatch.setattr(load.time, "perf_counter", lambda: client.now)
    meter = Meter(client)
    assert isinstance(client, Played | Client)
    for _ in range(2):
        with meter:
            asyncio.run(meter.complete())
        client.now += 100  # between the blocks
    assert meter.load().seconds == 0.5
    assert meter.load().server_cores == 2


def test_the_command_says_what_was_asked_otherwise() -> None:
    asked = ["--clients", "1", "64", "--seconds", "30", "--port", "5"]
    assert command(parser().parse_args(asked)) == "python -m bench.serving.load --clients 1 64 --seconds 30"
    assert command(parser().parse_args(["dir/cut.gguf"])) == "python -m bench.serving.load cut.gguf"
