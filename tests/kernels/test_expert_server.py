"""Experts computed on request through words in memory: what a GPU asks of the CPU, asked here by Python."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cpu_cases import same_bits
from expert_client import LIMIT_S, ROWS, ExpertClient
from quant_cases import VECTOR_TIERS, load
from random_blocks import activations, random_weight

from coldstream.errors import ModelChangedError
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc

NUM_EXPERTS, E, F, RANKS = 6, 512, 256, 3
Experts = tuple[_csrc.Weight, _csrc.Weight, _csrc.Weight]


Types = tuple[QuantType, QuantType, QuantType]
K_TYPES = (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K)


def experts(seed: int = 1, size: int = F, types: Types = K_TYPES) -> Experts:
    shapes = ((NUM_EXPERTS, size, E), (NUM_EXPERTS, size, E), (NUM_EXPERTS, E, size))
    gate, up, down = (
        load(random_weight(kind, shape, seed + i))
        for i, (kind, shape) in enumerate(zip(types, shapes, strict=True))
    )
    return gate, up, down


class Client(ExpertClient):
    def __init__(self, threads: int = 2, tier: str = "auto", *, is_prefill: bool = False) -> None:
        super().__init__(E, RANKS, threads, tier, is_prefill=is_prefill)


def plainly(client: Client, x: torch.Tensor, ids: torch.Tensor, weights: Experts) -> torch.Tensor:
    out = torch.full((*ids.shape, E), 7.0)
    _csrc.routed_experts(client.runtime, x, ids, *weights, out)
    return out


def random_ids(rows: int, elsewhere: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, NUM_EXPERTS, generator=generator).argsort(dim=-1)[:, :RANKS].int()
    return ids.masked_fill(torch.rand(rows, RANKS, generator=generator) < elsewhere, -1).contiguous()


@pytest.mark.sharded(6)
@pytest.mark.parametrize("tier", ["generic", *VECTOR_TIERS])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_layer_and_number_of_rows(tier: str, threads: int) -> None:
    client = Client(threads, tier)
    layers = [experts(seed=10 * i, size=F * (1 + i % 2)) for i in range(3)]
    assert [client.server.add_layer(*layer) for layer in layers] == [0, 1, 2]
    client.server.begin()
    for rows in (1, 2, 10, 11, 16):  # of up to 32 pairs the server computes they are few
        for number, layer in enumerate(layers):
            for elsewhere in (0.0, 0.5, 1.0):
                x, ids = activations(rows + number, rows, E), random_ids(rows, elsewhere, seed=rows)
                assert same_bits(client.ask(number, x, ids), plainly(client, x, ids, layer))
    client.server.end()
    client.server.check()


@pytest.mark.parametrize("tier", ["generic", *VECTOR_TIERS])
def test_rows_that_want_the_same_expert(tier: str) -> None:
    """As many as are multiplied together, one more, and pairs on both sides of what is few."""
    client, weights = Client(3, tier), experts()
    client.server.add_layer(*weights)
    client.server.begin()
    for rows, pairs in ((8, 8), (9, 9), (16, 16), (16, 32), (16, 33)):
        ids = torch.full((rows * RANKS,), -1, dtype=torch.int32)
        places = torch.arange(pairs)
        ids[places % rows * RANKS + places // rows] = (4 - places // rows).int()  # expert 4, then 3, then 2
        x, chosen = activations(rows, rows, E), ids.view(rows, RANKS)
        assert same_bits(client.ask(0, x, chosen), plainly(client, x, chosen, weights)), (rows, pairs)


@pytest.mark.parametrize("tier", ["generic", *VECTOR_TIERS])
@pytest.mark.parametrize(
    "types",
    [
        (QuantType.F32, QuantType.BF16, QuantType.F16),
        (QuantType.IQ2_XS, QuantType.Q8_0, QuantType.F32),
        (QuantType.Q5_0, QuantType.Q4_K, QuantType.Q8_0),
        (QuantType.Q6_K, QuantType.F16, QuantType.IQ4_NL),
    ],
    ids=str,
)
def test_experts_of_mixed_types(tier: str, types: Types) -> None:
    client, weights = Client(3, tier), experts(types=types)
    client.server.add_layer(*weights)
    client.server.begin()
    for rows in (1, 3, 16):
        x, ids = activations(rows, rows, E), random_ids(rows, 0.3, seed=rows)
        assert same_bits(client.ask(0, x, ids), plainly(client, x, ids, weights))


def test_what_was_asked_is_counted() -> None:
    client = Client()
    for layer in range(2):
        client.server.add_layer(*experts(seed=layer))
    client.server.begin()
    for rows in (1, 16, 3):
        client.ask(1, activations(1, rows, E), random_ids(rows, 1.0 if rows == 3 else 0.0))
    (requests, pairs, seconds), (other_requests, *_) = client.server.work()[1], client.server.work()[0]
    assert (requests, pairs, other_requests) == (3, 17 * RANKS, 0)
    assert seconds > 0


def test_what_is_expected_is_read_ahead_and_changes_nothing() -> None:
    """Whether it comes, comes too late, is wrong, or makes no sense."""
    client, layers = Client(), [experts(seed=1), experts(seed=2, size=2 * F)]
    for layer in layers:
        client.server.add_layer(*layer)
    client.server.begin()
    num_expected = num_right = 0
    for seed in range(60):
        number, x, ids = seed % 2, activations(seed, 1, E), random_ids(1, 0.2, seed)
        guess = random_ids(1, 0.2, seed + seed % 3)[0].tolist()
        client.expect(number, guess)
        num_expected += len({*guess} - {-1})
        if seed % 4:
            client.read_ahead()
            num_right += len({*guess} & {*ids[0].tolist()} - {-1})
        assert same_bits(client.ask(number, x, ids), plainly(client, x, ids, layers[number]))
        client.read_ahead()
    expected = client.server.expected()
    assert sum(each for each, _, _ in expected) == num_expected
    assert sum(asked for *_, asked in expected) >= sum(right for _, right, _ in expected) >= num_right > 0
    assert sum(asked for *_, asked in expected) == sum(pairs for _, pairs, _ in client.server.work())
    for words in (
        [3 << 16 | 1] * RANKS,
        [1 << 16 | (NUM_EXPERTS + 1)] * RANKS,
        [1] * RANKS,
        [2**32 - 1] * RANKS,
    ):
        client.ahead[:RANKS] = words
        client.read_ahead()
    assert client.server.expected() == expected, "no such layers or experts"
    client.server.end()
    client.server.check()


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_of_several_rows_an_expected_expert_is_right_once(rows: int) -> None:
    client, weights = Client(), experts()
    client.server.add_layer(*weights)
    client.server.begin()
    expected, right, asked = 0, 0, 0
    for seed in range(20):
        ids, guess = random_ids(rows, 0.4, seed), random_ids(1, 0.2, 100 + seed)[0].tolist()
        client.expect(0, guess)
        client.read_ahead()
        client.ask(0, activations(seed, rows, E), ids)
        wanted = set(ids.flatten().tolist()) - {-1}
        expected += len({*guess} - {-1})
        right += len(wanted & {*guess})
        asked += len(wanted)
    assert client.server.expected() == [(expected, right, asked)]
    client.server.end()
    client.server.check()


def expert_bytes(size: int = F, types: Types = K_TYPES) -> int:
    gate, up, down = types
    return size * (gate.row_bytes(E) + up.row_bytes(E)) + E * down.row_bytes(size)


def test_experts_of_later_layers_are_read_once_and_no_more_than_caches_hold() -> None:
    client = Client(threads=1)
    layers = [experts(seed=1), experts(seed=2), experts(seed=3, size=64 * F)]
    for layer in layers:
        client.server.add_layer(*layer)
    client.server.begin()

    def wait_for(num_bytes: int) -> int:
        deadline = time.monotonic() + LIMIT_S
        while (found := client.server.read_ahead_bytes()) < num_bytes:
            assert time.monotonic() < deadline, f"{found} bytes were read, of {num_bytes}"
        return found

    one = expert_bytes()
    client.expect(0, [3, -1, -1])
    assert wait_for(one) == one
    client.expect(1, [0, 2, -1])
    x, ids = activations(5, 1, E), torch.tensor([[3, -1, -1]], dtype=torch.int32)
    assert same_bits(client.ask(0, x, ids), plainly(client, x, ids, layers[0]))
    assert wait_for(3 * one) == 3 * one, "a request interrupts, and what is left is read behind it"
    client.expect(2, [0, 1, 2])
    wait_for(3 * one + 1)
    client.ask(1, x, ids)
    client.server.end()
    assert client.server.read_ahead_bytes() < 3 * one + RANKS * expert_bytes(64 * F)
    client.server.check()


@pytest.mark.parametrize("threads", [1, 3])
def test_guesses_two_layers_ahead_change_nothing(threads: int) -> None:
    """Right and wrong ones, in any number of layers, with layers that nothing is asked of."""
    client, layers = Client(threads), [experts(seed, (1 + seed % 3) * F) for seed in range(5)]
    for layer in layers:
        client.server.add_layer(*layer)
    client.server.begin()
    chosen = [random_ids(1, 0.3, seed) for seed in range(120)]
    for step, ids in enumerate(chosen[:-2]):
        wanted = chosen[step + 2] if step % 5 else random_ids(1, 0.3, seed=step)
        client.expect((step + 2) % len(layers), wanted[0].tolist())
        client.runtime.active_threads = 1 + step % threads
        if step % 7 == 3:
            continue
        x, layer = activations(step, 1, E), step % len(layers)
        assert same_bits(client.ask(layer, x, ids), plainly(client, x, ids, layers[layer]))
    client.server.end()
    client.server.check()
    assert client.server.read_ahead_bytes() > 0


def test_each_expected_expert_has_a_word() -> None:
    client = Client()
    parts = (client.request, client.done, client.x, client.ids, client.out)
    with pytest.raises(ValueError, match="of 3 experts of a layer, 2 have a word"):
        _csrc.ExpertServer(client.runtime, *parts, ahead=np.zeros(2, np.uint32))


def test_it_pauses_and_serves_again() -> None:
    client, weights = Client(), experts()
    client.server.add_layer(*weights)
    x, ids = activations(1, 2, E), random_ids(2, 0.3)
    expected = plainly(client, x, ids, weights)
    for _ in range(50):
        client.server.begin()
        assert same_bits(client.ask(0, x, ids), expected)
        client.server.end()
        assert same_bits(plainly(client, x, ids, weights), expected)  # the threads serve others in between


def test_a_request_that_makes_no_sense_is_answered_and_reported() -> None:
    client, weights = Client(), experts()
    client.server.add_layer(*weights)
    client.server.begin()
    x, ids = activations(1, 2, E), random_ids(2, 0.3)
    client.ask(5, x, ids)
    with pytest.raises(ValueError, match="layer 5 and 2 rows, which the mailbox does not have"):
        client.server.check()
    bad = ids.clone()
    bad[1, 1] = NUM_EXPERTS
    client.ask(0, x, bad)
    client.ask(0, x, ids)  # what follows an error is computed, and does not hide it
    with pytest.raises(ValueError, match="outside the experts"):
        client.server.check()
    client.server.check()
    assert same_bits(client.ask(0, x, ids), plainly(client, x, ids, weights))


def test_fl01_a_file_that_shrinks_is_an_error_and_no_hang(tmp_path: os.PathLike[str]) -> None:
    stacks = [
        random_weight(kind, shape, seed=1)
        for kind, shape in (
            (QuantType.Q4_K, (NUM_EXPERTS, F, E)),
            (QuantType.Q4_K, (NUM_EXPERTS, F, E)),
            (QuantType.Q6_K, (NUM_EXPERTS, E, F)),
        )
    ]
    path = os.path.join(tmp_path, "experts")
    starts = np.cumsum([0, *(stack.blocks.numel() for stack in stacks)])
    with open(path, "wb") as file:
        for stack in stacks:
            file.write(stack.blocks.numpy().tobytes())
    with open(path, "r+b") as file:
        mapped = _csrc.MappedFile(file.fileno(), int(starts[-1]), "experts")
        weights = [
            _csrc.Weight.from_file(
                mapped, int(start), int(stack.quant_type), stack.shape[1], stack.shape[2], NUM_EXPERTS
            )
            for start, stack in zip(starts, stacks, strict=False)
        ]
        client = Client()
        client.server.add_layer(*weights)
        client.server.begin()
        x, ids = activations(1, 2, E), random_ids(2, 0.0)
        client.ask(0, x, ids)
        client.server.check()
        file.truncate(4096)
        client.ask(0, x, ids)
        with pytest.raises(ModelChangedError, match="experts"):
            client.server.check()


def test_what_does_not_fit_is_refused() -> None:
    client = Client()
    gate, up, _ = experts()
    with pytest.raises(ValueError, match="must be experts for rows of 512"):
        client.server.add_layer(gate, up, gate)
    with pytest.raises(ValueError, match="a mailbox is x"):
        _csrc.ExpertServer(
            client.runtime, client.request, client.done, client.x, client.ids, torch.zeros(ROWS, RANKS, 8)
        )


def test_a_server_that_serves_can_be_given_up() -> None:
    for _ in range(20):
        client = Client(threads=3)
        client.server.add_layer(*experts())
        client.server.begin()
        del client


ON_ONE_CPU = """
import os
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
from test_expert_server import Client, activations, experts, plainly, random_ids, same_bits
client, weights = Client(threads=4), experts()
client.server.add_layer(*weights)
client.server.begin()
for number in range(40):
    x, ids = activations(number, 2, 512), random_ids(2, 0.3, seed=number)
    assert same_bits(client.ask(0, x, ids), plainly(client, x, ids, weights))
client.server.check()
"""


@pytest.mark.sharded(of="kernels")
def test_ex08_one_cpu_for_more_threads_than_that() -> None:
    """Polling threads yield the core, as client and threads would otherwise starve each other."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", ON_ONE_CPU], check=True, timeout=5 * LIMIT_S, env=environment)


def wait_until(done: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, problem


def test_threads_of_a_prompt_poll_between_its_requests_no_longer_than_is_set() -> None:
    client, weights = Client(threads=3, is_prefill=True), experts()
    client.server.add_layer(*weights)
    x, ids = activations(1, 2, E), random_ids(2, 0.3)
    expected, runtime = plainly(client, x, ids, weights), client.runtime
    assert client.server.awake_s == 0
    client.server.begin()
    for _ in range(5):
        assert same_bits(client.ask(0, x, ids), expected)
        assert not runtime.stays_awake
    client.server.awake_s = 2 * LIMIT_S  # so that only `end` ends it
    for _ in range(5):
        assert same_bits(client.ask(0, x, ids), expected)
        wait_until(lambda: runtime.stays_awake, "threads sleep between requests")
    client.server.end()
    wait_until(lambda: not runtime.stays_awake, "threads poll behind a prompt")
    client.server.begin()
    wait_until(lambda: runtime.stays_awake, "threads sleep until the first request")
    client.server.awake_s = 0.0001
    wait_until(lambda: not runtime.stays_awake, "threads poll for longer than is set")
    assert same_bits(client.ask(0, x, ids), expected), "those that sleep are woken"
    client.server.end()
    client.server.check()


def test_threads_of_decode_steps_poll_from_begin_to_end() -> None:
    client = Client(threads=2)
    assert not client.runtime.stays_awake
    client.server.begin()
    wait_until(lambda: client.runtime.stays_awake, "threads sleep between requests")
    client.server.end()
    wait_until(lambda: not client.runtime.stays_awake, "threads poll at rest")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 3601.0])
def test_a_time_to_stay_awake_that_makes_no_sense_is_refused(seconds: float) -> None:
    client = Client(is_prefill=True)
    with pytest.raises(ValueError, match="threads that stay awake for"):
        client.server.awake_s = seconds
    assert client.server.awake_s == 0
