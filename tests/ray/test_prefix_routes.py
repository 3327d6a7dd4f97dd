"""Which replica a request goes to: properties of the choice, without replicas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.errors import ConfigError
from coldstream.ray.prefix_routes import BLOCK_TOKENS, PrefixRoutes, block_keys

NAMES = ("a", "b", "c", "d")
replicas = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
# Prompts of a few blocks, of which many begin alike.
prompts = st.lists(st.integers(0, 2), max_size=5).map(
    lambda blocks: [token for block in blocks for token in [block] * BLOCK_TOKENS]
)
namespaces = st.sampled_from(["", "one", "two"])
requests = st.lists(st.tuples(namespaces, prompts), max_size=30)


def shared_blocks(one: list[int], two: list[int]) -> int:
    """Whole blocks that two prompts begin with alike, by comparing tokens."""
    shared = 0
    for first, second in zip(one, two, strict=False):
        if first != second:
            break
        shared += 1
    return shared // BLOCK_TOKENS


@given(prompts, prompts, st.lists(st.integers(0, 2**32 - 1), max_size=BLOCK_TOKENS - 1))
def test_prompts_share_as_many_keys_as_whole_blocks(one: list[int], two: list[int], rest: list[int]) -> None:
    first, second = block_keys("", one + rest), block_keys("", two)
    assert len(second) == len(two) // BLOCK_TOKENS
    same = [a == b for a, b in zip(first, second, strict=False)]
    shared = shared_blocks(one + rest, two)
    assert same == [True] * shared + [False] * (len(same) - shared)


@given(prompts, st.text(), st.text())
def test_namespaces_share_no_key(prompt: list[int], one: str, two: str) -> None:
    shared = set(block_keys(one, prompt)) & set(block_keys(two, prompt))
    assert shared == (set(block_keys(one, prompt)) if one == two else set())


@given(requests, replicas, st.integers(0, 3))
def test_a_request_goes_to_the_longest_prefix_within_the_lead(
    asked: list[tuple[str, list[int]]], names: list[str], lead: int
) -> None:
    """Against a table of everything that was sent, as nothing is forgotten here."""
    routes = PrefixRoutes(max_lead=lead)
    sent: dict[str, list[tuple[str, list[int]]]] = {name: [] for name in names}
    loads = dict.fromkeys(names, 0)
    for request_id, (namespace, prompt) in enumerate(asked):
        best = {
            name: max(
                (shared_blocks(prompt, old) for space, old in sent[name] if space == namespace), default=0
            )
            for name in names
        }
        near = [name for name in names if loads[name] - min(loads.values()) <= lead]
        longest = max(best[name] for name in near)
        chosen = routes.choose(request_id, block_keys(namespace, prompt), names)
        assert chosen in near
        assert best[chosen] == longest
        assert loads[chosen] == min(loads[name] for name in near if best[name] == longest)
        sent[chosen].append((namespace, prompt))
        loads[chosen] += 1
        assert routes.loads() == loads


@given(requests, replicas, st.integers(0, 3))
def test_loads_never_part_by_more_than_the_lead_and_one(
    asked: list[tuple[str, list[int]]], names: list[str], lead: int
) -> None:
    routes = PrefixRoutes(max_lead=lead)
    for request_id, (namespace, prompt) in enumerate(asked):
        routes.choose(request_id, block_keys(namespace, prompt), names)
        loads = routes.loads().values()
        assert max(loads) - min(loads) <= lead + 1


@given(replicas, st.integers(1, 20))
def test_prompts_that_share_nothing_alternate(names: list[str], repeats: int) -> None:
    routes = PrefixRoutes()
    for number in range(repeats):
        turn = []
        for place in range(len(names)):
            request_id = number * len(names) + place
            turn.append(routes.choose(request_id, block_keys("", [request_id] * BLOCK_TOKENS), names))
            routes.release(request_id)
        assert sorted(turn) == sorted(names)


@given(requests, st.integers(1, 6))
def test_no_more_blocks_are_remembered_than_allowed(
    asked: list[tuple[str, list[int]]], max_blocks: int
) -> None:
    routes = PrefixRoutes(max_blocks=max_blocks)
    for request_id, (namespace, prompt) in enumerate(asked):
        routes.choose(request_id, block_keys(namespace, prompt), NAMES)
        routes.release(request_id)
        assert all(count <= max_blocks for count in routes.num_blocks().values())
    assert set(routes.loads().values()) <= {0}


@given(st.integers(1, 6), st.integers(1, 6))
def test_the_end_of_the_prompt_that_was_used_last_ago_is_forgotten_first(kept: int, more: int) -> None:
    keys = block_keys("", range((kept + more) * BLOCK_TOKENS))
    routes = PrefixRoutes(max_blocks=kept + more, max_lead=0)
    routes.choose(0, keys, ["a"])
    routes.release(0)
    routes.choose(1, block_keys("other", range(more * BLOCK_TOKENS)), ["a"])
    assert routes.choose(2, keys[: kept + 1], ["a", "b"]) == "b"  # as "a" is busy
    routes.release(1)
    routes.release(2)
    # Of two that know as much, the one chosen longer ago is next: "a".
    assert routes.choose(3, keys[:kept], ["a", "b"]) == "a"
    routes.release(3)
    routes.choose(4, (), ["a", "b"])
    routes.release(4)
    routes.choose(5, (), ["a", "b"])
    routes.release(5)
    assert routes.choose(6, keys[: kept + 1], ["a", "b"]) == "b"


def test_a_prompt_that_comes_again_is_remembered_longer() -> None:
    first, second, third = (block_keys("", [number] * BLOCK_TOKENS) for number in range(3))
    routes = PrefixRoutes(max_blocks=2)
    for keys in (first, second, first, third):
        routes.choose(0, keys, ["a"])
        routes.release(0)
    # "b" is new, and chosen for what "a" does not know.
    assert routes.choose(1, first, ["a", "b"]) == "a"
    routes.release(1)
    assert routes.choose(2, second, ["a", "b"]) == "b"


@given(requests, replicas)
def test_nothing_is_known_of_a_replica_that_went_away(
    asked: list[tuple[str, list[int]]], names: list[str]
) -> None:
    routes = PrefixRoutes()
    for request_id, (namespace, prompt) in enumerate(asked):
        routes.choose(request_id, block_keys(namespace, prompt), names)
    routes.choose(-1, (), ["new"])
    assert routes.loads() == {"new": 1}
    assert routes.num_blocks() == {"new": 0}
    for request_id in range(len(asked)):
        assert routes.route_of(request_id) is None
        routes.release(request_id)  # its stream ends only now
    for name in names:
        routes.choose(-2, (), [name, "new"])
        assert routes.loads()[name] == 1
        assert routes.num_blocks()[name] == 0
        routes.release(-2)


def test_a_request_that_was_not_taken_goes_elsewhere_and_back_if_there_is_no_other() -> None:
    keys = block_keys("", range(BLOCK_TOKENS))
    routes = PrefixRoutes()
    assert routes.choose(0, keys, ["a"]) == "a"
    assert routes.choose(0, keys, ["a", "b"]) == "b"
    assert routes.choose(0, keys, ["a", "b"]) == "a"
    assert routes.choose(0, keys, ["a"]) == "a"
    assert routes.loads() == {"a": 1}
    routes.release(0)
    routes.release(0)
    assert routes.loads() == {"a": 0}


@pytest.mark.parametrize(
    ("options", "name"),
    [({"max_blocks": 0}, "max_blocks"), ({"max_lead": -1}, "max_lead"), ({"max_lead": True}, "max_lead")],
)
def test_bounds_out_of_their_range_are_refused(options: dict[str, int], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        PrefixRoutes(**options)
