"""The CPU's threads beside a GPU."""

import pytest

pytest.importorskip("cuda.bindings")

from coldstream.experts import host
from coldstream.experts.host import AWAKE_S, HostExperts
from coldstream.kernels.experts.mailbox import Mailbox


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("threads", "usable", "awake_s"),
    [(1, 1, 0.0), (1, 2, AWAKE_S), (5, 6, AWAKE_S), (6, 6, 0.0), (8, 6, 0.0)],
)
def test_threads_poll_between_requests_where_one_more_has_a_cpu(
    threads: int, usable: int, awake_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "usable_cpus", lambda: usable)
    experts = HostExperts(threads, Mailbox.create(2, 256), Mailbox.create(2, 256, 1), 8)
    assert experts.bulk_server.awake_s == awake_s
    assert experts.server.awake_s == 0, "those of decode steps poll anyway"
    experts.close()
