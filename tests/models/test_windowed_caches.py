"""Layers with windows that keep their windows alone: the bits of caches that keep all positions."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from cuda_runner_cases import open_cuda
from one_sequence import OneSequence, open_cpu
from runner_cases import MIX

from builders import Dims, MixedAttention, write_gguf
from coldstream.errors import InvalidRequestError
from coldstream.kvcache import Batch, CacheSize, Checkpoint, Segment, Sequence
from coldstream.kvcache.windows import VOID, blocks_at_rest, blocks_of_pool

CONTEXT = 1900
CHUNK = 512  # rows of a step on a CPU
NUM_STATES = 6
ALL = CacheSize(num_blocks=48, num_states=NUM_STATES, num_tree_rows=64)
LENGTHS = (1, 1, 2, 17, 130, 255, 256, 257, 400)
WINDOWS = (1, 100, 257, 600)


def least_size(window: int) -> CacheSize:
    """As few blocks of windows as a plan has."""
    return CacheSize(ALL.num_blocks, NUM_STATES, 64, blocks_of_pool(window, NUM_STATES, CHUNK))


@dataclass
class Model:
    path: Path
    window: int
    keeps_all: OneSequence


@pytest.fixture(scope="module", params=[*WINDOWS, "gemma4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("models") / "windows.gguf"
    if request.param == "gemma4":
        write_gguf(path, "gemma4", types=MIX, dims=Dims(layers=3, head_dim=256))
    else:
        mixed = MixedAttention((4, 2, 4), (True, False, True), request.param)
        write_gguf(path, "qwen3moe", types=MIX, dims=Dims(layers=3), mixed=mixed)
    with open_cpu(path, threads=1, context_length=CONTEXT, cache_size=ALL) as runner:
        window = max(each.window or 0 for each in runner.spec.attentions)
        yield Model(path, window, runner)


@dataclass
class Walk:
    """Random calls of two runners that hold the same sequences, and what they compute."""

    runners: tuple[OneSequence, OneSequence]
    window: int
    random: Random
    sequences: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    checkpoints: list[tuple[Checkpoint, Checkpoint]] = field(default_factory=list)  # of the first sequence
    num_rows: int = 0

    def run(self, num_calls: int) -> None:
        calls = (
            self.chain,
            self.chain,
            self.forks,
            self.tree,
            self.fork,
            self.drop,
            self.truncate,
            self.back,
        )
        self.sequences.append(self.new())
        for _ in range(num_calls):
            self.random.choice(calls)()
            for sequence in (pair[1] for pair in self.sequences):
                assert len(sequence.windows) - sequence.first_held <= blocks_at_rest(self.window)
        for pair in self.sequences:
            self.release(pair)
        assert all(runner.free == runner.cache_size for runner in self.runners)

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(256) for _ in range(count)]

    def new(self) -> tuple[Sequence, Sequence]:
        first, second = (runner.new_sequence() for runner in self.runners)
        return first, second

    def release(self, pair: tuple[Sequence, Sequence]) -> None:
        for runner, sequence in zip(self.runners, pair, strict=True):
            runner.release(sequence)

    def step(
        self,
        *segments: tuple[tuple[Sequence, Sequence], dict[str, Any]],
        fork: tuple[int, tuple[Sequence, Sequence]] | None = None,
    ) -> None:
        """fork: rows before it, of the only segment."""
        found = []
        for side, runner in enumerate(self.runners):
            forks = () if fork is None else ((fork[0], fork[1][side]),)
            parts = tuple(Segment(pair[side], **each, forks=forks) for pair, each in segments)
            found.append([np.array(logits) for logits in runner.step(Batch(parts))])
        for first, second in zip(*found, strict=True):
            assert first.tobytes() == second.tobytes()
            self.num_rows += len(first)

    def drawn(self, count: int) -> tuple[tuple[Sequence, Sequence], int] | None:
        """A sequence that has room for so many rows, or fewer."""
        pair = self.random.choice(self.sequences)
        count = min(count, CONTEXT - pair[0].length)
        return (pair, count) if count else None

    def chain(self) -> None:
        """Of one sequence, or a row of each in one step."""
        if self.random.random() < 0.3:
            pairs = [pair for pair in self.sequences if pair[0].length < CONTEXT]
            self.step(*((pair, {"token_ids": self.ids(1)}) for pair in pairs))
        elif drawn := self.drawn(self.random.choice(LENGTHS)):
            self.step((drawn[0], {"token_ids": self.ids(drawn[1]), "wanted": range(drawn[1])}))

    def forks(self) -> None:
        drawn = self.drawn(420)
        if drawn is None or drawn[1] < 420 or len(self.sequences) > 3:
            return
        fork = self.new()
        before = self.random.choice((64, 200, 256))
        self.step((drawn[0], {"token_ids": self.ids(420)}), fork=(before, fork))
        self.sequences.append(fork)

    def tree(self) -> None:
        drawn = self.drawn(20)
        if drawn is None:
            return
        pair, count = drawn
        parents = [self.random.randrange(max(-1, row - 3), row) for row in range(count)]
        self.step((pair, {"token_ids": self.ids(count), "parents": parents}))
        row, path = self.random.randrange(-1, count), list[int]()
        while row >= 0:
            path.insert(0, row)
            row = parents[row]
        for runner, sequence in zip(self.runners, pair, strict=True):
            runner.commit(sequence, path)

    def fork(self) -> None:
        if len(self.sequences) < 4:
            pair = self.random.choice(self.sequences)
            first, second = (r.fork(each) for r, each in zip(self.runners, pair, strict=True))
            self.sequences.append((first, second))

    def drop(self) -> None:
        if len(self.sequences) > 1:
            self.release(self.sequences.pop())

    def truncate(self) -> None:
        """To where the sequence with windows can go on, of which its end is one."""
        pair = self.random.choice(self.sequences[1:] or self.sequences)
        if pair[0].checkpoints:
            return
        with self.runners[1].contents() as cache:
            least = cache.least_length(pair[1])
            if least:
                with pytest.raises(InvalidRequestError, match=f"to {least} and more"):
                    cache.truncate(pair[1], least - 1)
        length = self.random.choice((least, pair[1].length, self.random.randint(least, pair[1].length)))
        for runner, sequence in zip(self.runners, pair, strict=True):
            with runner.contents() as cache:
                cache.truncate(sequence, length)

    def back(self) -> None:
        """A checkpoint of the first sequence, or the way back to one."""
        pair = self.sequences[0]
        if self.checkpoints:
            for runner, sequence, each in zip(self.runners, pair, self.checkpoints.pop(), strict=True):
                runner.restore(sequence, each)
                runner.drop(sequence, each)
        else:
            first, second = (r.checkpoint(each) for r, each in zip(self.runners, pair, strict=True))
            self.checkpoints.append((first, second))


@pytest.mark.parametrize("seed", range(2))
def test_a_cpu(model: Model, seed: int) -> None:
    size = least_size(model.window)
    with open_cpu(model.path, threads=2, context_length=CONTEXT, cache_size=size) as runner:
        walk = Walk((model.keeps_all, runner), model.window, Random(seed))
        walk.run(60)
        assert walk.num_rows > 100


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("model", [100], indirect=True)
def test_a_gpu(model: Model) -> None:
    """Blocks that one text gave back are another's while the first goes on."""
    with open_cuda(model.path, context_length=CONTEXT, cache_size=least_size(model.window)) as runner:
        walk = Walk((model.keeps_all, runner), model.window, Random(7))
        first, second = walk.new(), walk.new()
        walk.step((first, {"token_ids": walk.ids(380)}))
        given = first[1].windows[0]
        walk.step((first, {"token_ids": walk.ids(1)}))
        assert (first[1].first_held, first[1].windows[0]) == (1, VOID)
        walk.step((second, {"token_ids": walk.ids(100)}))
        assert second[1].windows == [given]
        walk.sequences += [first, second]
        walk.fork()
        for _ in range(2):
            walk.tree()
        walk.step(*((each, {"token_ids": walk.ids(1)}) for each in walk.sequences))


@pytest.mark.gpu
def test_a_real_gpu(model: Model) -> None:
    size = least_size(model.window)
    for seed in range(3):
        with open_cuda(model.path, context_length=CONTEXT, cache_size=size) as runner:
            walk = Walk((model.keeps_all, runner), model.window, Random(seed))
            walk.run(60)
            assert walk.num_rows > 100
