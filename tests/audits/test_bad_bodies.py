"""The bodies of `tests/audits/bad_bodies.py`, and when its run fails."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bench.serving.served import served
from coldstream.assets import demo_model_path
from tests.audits import bad_bodies
from tests.audits.bad_body_kinds import AT_ONCE, KINDS, Kind, repeated

MIB = 1 << 20


@pytest.mark.parametrize("size", [100, 1000, 1001, 4096])
def test_a_body_of_repeated_entries_is_as_long_as_asked_for_and_json(size: int) -> None:
    body = repeated('[], ""', size)
    assert size - 8 < len(body) <= size
    assert set(map(json.dumps, json.loads(body)["prompt"])) == {"[]", '""'}


def test_kinds_are_of_different_routes_and_fit_into_a_request() -> None:
    bodies = {name: kind.body() for name, kind in KINDS.items()}
    assert all(len(body) <= 32 * MIB for body in bodies.values())
    assert len(set(map(hash, bodies.values()))) == len(bodies) >= 13
    assert len({kind.path for kind in KINDS.values()}) >= 5


GOOD: dict[str, Any] = {
    "faults": [],
    "status": 400,
    "seconds": 0.5,
    "health_worst_s": 0.05,
    "memory_bytes": 10,
    "limit_bytes": 10,
}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, ""),
        ({"faults": ["lost"]}, "lost"),
        ({"status": 500}, "status"),
        ({"seconds": 1.01}, "seconds"),
        ({"health_worst_s": 0.11}, "/health"),
        ({"memory_bytes": 11}, "bytes"),
    ],
    ids=str,
)
def test_a_run_fails_for_what_is_beyond_a_bound(change: dict[str, Any], what: str) -> None:
    wrong = bad_bodies.missed("kind", GOOD | change, {400}, 1.0)
    assert len(wrong) == (1 if what else 0)
    assert all(what in each for each in wrong)


@pytest.mark.sharded(of="measurements")
def test_a_small_body_is_measured_over_a_server(tmp_path: Path) -> None:
    kind = Kind(lambda: repeated('[], ""', 1000))
    with served(demo_model_path(), tmp_path / "log", "--threads", "1", "--ctx-size", "2048") as server:
        with (
            closing(bad_bodies.Stream(server.url)) as stream,
            bad_bodies.Repeated(stream.part, 0.0) as streaming,
        ):
            found = bad_bodies.one(server, stream, kind)
            together = bad_bodies.at_once(server, stream, kind, 3)
        assert streaming.faults == []
        assert len(streaming.values) > 0
    assert (found["status"], found["faults"]) == (400, [])
    assert found["message"].startswith("prompt[1]: ")
    assert (found["health_asked"] > 0, found["bytes"] > 990) == (True, True)
    assert (together["statuses"], together["count"]) == ({"400": 3}, 3)
    assert AT_ONCE in KINDS
