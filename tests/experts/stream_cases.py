"""Prefill steps with experts copied through a ring, on the model of a device."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from coldstream.experts.cpu.pooled_stacks import PooledStacks
from coldstream.experts.host import HostExperts
from coldstream.experts.prefill import ExpertStream, StagedGroup
from coldstream.experts.ram_pool import RamPool
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels import _csrc
from coldstream.kernels.cuda.memory import own_bytes
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.table import ExpertTable
from device_model import ModelDevice, Operation, Pieces, range_of

NUM_LAYERS, NUM_EXPERTS, RANKS, SIZE = 3, 8, 3, 256
MAX_CPU_ROWS, CHUNK = 6, 10
BUFFER_BYTES = 2 * 3 * 256 * 272 + 1024  # two experts


def open_pool(file: GGUFFile, num_slots: int) -> RamPool:
    """A pool in RAM of `num_slots` of each size for the experts of a file."""
    stacks = PooledStacks(
        file,
        [
            [file.tensors[f"blk.{layer}.ffn_{name}_exps.weight"] for name in ("gate", "up", "down")]
            for layer in range(NUM_LAYERS)
        ],
    )
    return RamPool(stacks, dict.fromkeys(stacks.expert_bytes, num_slots), 1)


def open_host(
    file: GGUFFile, num_slots: int | None = None
) -> tuple[HostExperts, list[tuple[ExpertTable, ...]]]:
    """The experts of a file, and their tables, without slots on the device.

    num_slots: those in RAM, of each size; None: the file is mapped.
    """
    bulk = Mailbox.create(RANKS, SIZE, MAX_CPU_ROWS)
    pool = None if num_slots is None else open_pool(file, num_slots)
    host = HostExperts(1, Mailbox.create(RANKS, SIZE), bulk, CHUNK, pool)
    if pool is not None:
        pool.empty()
    layers = []
    for layer in range(NUM_LAYERS):
        stacks = []
        for name in ("gate", "up", "down"):
            info = file.tensors[f"blk.{layer}.ffn_{name}_exps.weight"]
            weight, source = host.map_weight(file, info)
            mapped = host.device_address(source, 1)
            num_experts, rows, cols = info.shape
            table = torch.zeros(num_experts, dtype=torch.int64)
            step = info.num_bytes // num_experts
            stacks.append(ExpertTable(table, info.quant_type, rows, cols, True, weight, mapped, step, source))
        host.add_layer(stacks)
        layers.append(tuple(stacks))
    return host, layers


class Prompts:
    """Steps of an `ExpertStream`; checks that each pair is computed once, from its expert's bytes."""

    def __init__(self, device: ModelDevice, path: Path, seed: int, num_slots: int | None = None) -> None:
        self.device, self.rng = device, np.random.default_rng(seed)
        self.file = GGUFFile.open(path)
        self.host, self.layers = open_host(self.file, num_slots)
        self.ring = own_bytes(3 * BUFFER_BYTES)
        self.stream = ExpertStream(self.host, self.ring)
        for stacks in self.layers:
            self.stream.add_layer(stacks)
        self.stream.resident = self.rng.random((NUM_LAYERS, NUM_EXPERTS)) < 0.2
        # One layer after the other uses the same memory.
        self.x = torch.zeros(CHUNK, SIZE)
        self.ids = torch.zeros(CHUNK, RANKS, dtype=torch.int32)
        self.places = torch.zeros(CHUNK + 2, RANKS, dtype=torch.int32)
        self.guess = torch.zeros(CHUNK, RANKS, dtype=torch.int32)
        self.guesses: list[int] | None = None  # experts that all tokens are guessed to choose; None: any
        self.only: list[int] | None = None  # the experts that routers may choose

    def into_ring(self, refuses: Callable[[Pieces], bool]) -> Callable[[Pieces], bool]:
        """Asks only of copies into the ring."""
        begin = self.ring.data_ptr()
        return lambda pieces: begin <= pieces[0][0] < begin + self.ring.numel() and refuses(pieces)

    def step(self, rows: int) -> None:
        self.stream.start_step(rows)
        for layer in range(NUM_LAYERS):
            self._layer(layer, rows)
        self.device.current.synchronize()
        self.stream.end_step()

    def _layer(self, layer: int, rows: int) -> None:
        width = self.rng.integers(RANKS, NUM_EXPERTS + 1)  # few experts for all tokens, or many
        among = np.arange(width) if self.only is None else np.array(self.only)
        chosen = np.stack([self.rng.permutation(among)[:RANKS] for _ in range(rows)]).astype(np.int32)
        values = self.rng.normal(size=(rows, SIZE)).astype(np.float32)
        x, ids = self.x[:rows], self.ids[:rows]

        def route(operation: Operation) -> None:
            x.numpy()[:], ids.numpy()[:] = values, chosen

        self.device.queue("router", writes=[range_of(x), range_of(ids)], effect=route)
        self.stream.ask(x, ids)
        counts = np.bincount(chosen.reshape(-1), minlength=NUM_EXPERTS)
        computed: list[int] = []

        def compute(groups: Sequence[StagedGroup], places: slice) -> None:
            self._compute(layer, groups)
            mine = [expert for group in groups for expert in group.experts if counts[expert]]
            ends = np.cumsum(counts)
            assert all(places.start <= ends[i] - counts[i] and ends[i] <= places.stop for i in mine)
            computed.extend(mine)

        places, guess = self.places[: rows + 2], self._guess(layer + 1, rows)
        self.stream.share_out(layer, rows, compute, places, guess)
        elsewhere = self.stream.answer(places)
        resident = self.stream.resident[layer].copy()
        assert len(set(computed)) == len(computed)
        on_gpu = np.isin(chosen, computed) | resident[chosen]
        if elsewhere is None:
            assert on_gpu.all()
            return

        def combine(operation: Operation) -> None:
            on_cpu = elsewhere.ids.numpy()
            assert np.array_equal(on_cpu, np.where(on_gpu, -1, chosen)), "every pair is computed once"
            expected = torch.zeros(rows, RANKS, SIZE)
            runtime = _csrc.Runtime(1, "generic")
            names = [f"blk.{layer}.ffn_{name}_exps.weight" for name in ("gate", "up", "down")]
            weights = [self.host.ops.map_weight(self.file, self.file.tensors[name]) for name in names]
            _csrc.routed_experts(
                runtime, torch.from_numpy(values), torch.from_numpy(on_cpu), *weights, expected
            )
            rows_there = torch.from_numpy(elsewhere.rows.numpy())[torch.from_numpy(~on_gpu)]
            assert torch.equal(rows_there, expected[torch.from_numpy(~on_gpu)]), "the CPU's rows"

        self.device.queue(
            "combine", reads=[range_of(elsewhere.rows), range_of(elsewhere.ids)], effect=combine
        )

    def _guess(self, layer: int, rows: int) -> torch.Tensor | None:
        """Queues a guess at the choice of a layer, right or wrong."""
        if not self.stream.guesses(layer, rows):
            return None
        among = np.arange(NUM_EXPERTS) if self.guesses is None else np.array(self.guesses)
        ids, guessed = self.guess[:rows], self.rng.choice(among, (rows, RANKS))

        def route(operation: Operation) -> None:
            ids.numpy()[:] = guessed

        self.device.queue("guess", writes=[range_of(ids)], effect=route)
        return ids

    def _compute(self, layer: int, groups: Sequence[StagedGroup]) -> None:
        """Reads all of the groups."""
        places = [
            (group.first[m] + i * group.sizes[m], self.layers[layer][m], expert)
            for group in groups
            for i, expert in enumerate(group.experts)
            for m in range(MATRICES)
        ]

        def read(operation: Operation) -> None:
            for address, stack, expert in places:
                source = stack.source + expert * stack.step
                found, expected = (ctypes.string_at(each, stack.step) for each in (address, source))
                assert found == expected, f"the bytes of expert {expert} of layer {layer}"

        self.device.queue(
            "experts", reads=[(address, stack.step) for address, stack, _ in places], effect=read
        )

    def close(self) -> None:
        self.device.current.synchronize()
        self.stream.close()
        del self.stream, self.ring
        self.host.close()
        self.file.close()
