"""The CPU's threads beside a GPU."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from coldstream.experts import host
from coldstream.experts.host import AWAKE_S, HostExperts
from coldstream.kernels.experts.mailbox import UNWRITTEN, Mailbox


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


@pytest.mark.usefixtures("gpu")
def test_rows_of_a_launch_that_failed_are_marked_before_the_next_one() -> None:
    box = Mailbox.create(2, 256, 3, is_marked=True)
    experts, words = HostExperts(1, box, Mailbox.create(2, 256, 1), 8), box.out.numpy().view(np.uint32)
    assert (words == UNWRITTEN).all()
    experts.begin_step(1)
    words[0] = 5
    experts.step_launched()
    experts.begin_step(1)
    assert (words[0] == 5).all(), "the sum of a step that was launched marks what it reads"
    experts.begin_step(1)
    assert (words == UNWRITTEN).all()
    experts.close()
