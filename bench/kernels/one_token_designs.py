"""The ladder of designs of `one_token.py`: each changes one thing of the first, or joins what should help."""

from bench.kernels.one_token_shapes import KIB, Design, Ring

FIRST = Design("first", "the design of the first probe: a thread polls, two rings, experts in rows of all")
_change = FIRST.changed
THREE = {"rings": (Ring(4, 22 * KIB), Ring(2, 18 * KIB), Ring(4, 18 * KIB)), "ring_of": (0, 1, 2)}
SPREAD = {"counter_stride": 32, "counter_splits": 4}
EARLY = {"shared_first": True, "keeps_inputs": True}
BEST = Design(
    "joined",
    "all that should help at once: a warp polls and copies inputs near, three rings, shared expert first",
    poll="warp",
    fetch="copy",
    only_with_work=True,
    **THREE,  # type: ignore[arg-type]
    **SPREAD,  # type: ignore[arg-type]
    **EARLY,  # type: ignore[arg-type]
)
DESIGNS = (
    FIRST,
    _change("norm apart", "what joining norm and quantisation to the reader saves", norm="phase"),
    _change(
        "choice by the last block",
        "whether one top-k and one more signal beat 132 of them",
        choice="last block",
    ),
    _change("combine apart", "what summing experts by rows saves", combine="phase"),
    _change("combine in the reader", "the same if readers sum 9 rows, 72 KB from L2 each", combine="reader"),
    _change("shared first", "whether bytes before the router's answer fill its latency", shared_first=True),
    _change("inputs kept", "gate and up without a wait and a quantisation of their own", **EARLY),
    _change("state late", "what loading the recurrence's state before the wait saves", state="late"),
    _change("state by ring", "the state as a piece of a ring, far ahead", state="ring"),
    _change("three rings", "experts behind no static weights, and these behind no expert", **THREE),
    _change(
        "small rings",
        "whether rings are too small: with half of them",
        rings=(Ring(3, 22 * KIB), Ring(2, 18 * KIB)),
    ),
    _change("large rings", "the same with more", rings=(Ring(6, 22 * KIB), Ring(4, 18 * KIB))),
    _change(
        "narrow stages",
        "whether short copies are slow: half as much of the input projection in twice the stages",
        rings=(Ring(10, 11 * KIB), Ring(4, 18 * KIB)),
    ),
    _change(
        "few blocks",
        "fewer who raise: router in 64 blocks, blocks without work take no part",
        only_with_work=True,
        router_blocks=64,
    ),
    _change("warp polls", "a warp of its own polls, consumers sleep at a barrier", poll="warp"),
    _change("backoff", "whether polling itself slows memory", poll="warp", backoff_ns=100),
    _change("thread backoff", "the same with the consumers' thread", backoff_ns=100),
    _change("counters apart", "counters in lines of their own", counter_stride=32),
    _change(
        "counters spread",
        "a counter over four lines, as 132 additions to one word take their time",
        poll="warp",
        **SPREAD,
    ),
    _change(
        "inputs by copy", "inputs by bulk copy as soon as the counter is seen", poll="warp", fetch="copy"
    ),
    _change(
        "cluster of 2",
        "one poller for two blocks, who tells the other by distributed shared memory",
        poll="cluster",
        cluster=2,
    ),
    _change("cluster of 4", "the same for four", poll="cluster", cluster=4),
    _change(
        "static near", "static weights behind the projection asked into L2 a layer ahead", near=("static",)
    ),
    _change("down near", "down's weights asked into L2 with the router's answer", near=("down",)),
    _change("four tokens", "what a launch, its start and its end cost", tokens=4),
    BEST,
    BEST.changed("joined, last block", "the same with one choice", choice="last block", counter_splits=1),
    BEST.changed("joined, loads", "the same with inputs by loads", fetch="loads"),
    BEST.changed("joined, down near", "the same with down's weights in L2", near=("down",)),
    BEST.changed(
        "joined, cluster",
        "the same, polled by clusters of two",
        poll="cluster",
        cluster=2,
        only_with_work=False,
    ),
    BEST.changed("joined, four tokens", "the same, several tokens", tokens=4),
)
