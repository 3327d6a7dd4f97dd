"""Random draft trees, and plain decoding along their paths."""

from dataclasses import dataclass
from random import Random

import numpy as np
from one_sequence import OneSequence, step_rows

from coldstream.kvcache import Batch, Segment, Sequence

# Around blocks of 64 positions and chunks of 256, where a tree begins in one and ends in another.
LENGTHS = (0, 1, 5, 63, 64, 65, 130, 191, 193, 254, 255, 256, 257, 300, 449, 500)
CONTEXT = 640
NUM_NEXT = 8  # tokens after a commit


@dataclass(frozen=True)
class Tree:
    token_ids: list[int]
    parents: list[int]

    def path(self, row: int) -> list[int]:
        """Rows from the root of `row` to it."""
        result = [row]
        while self.parents[result[0]] >= 0:
            result.insert(0, self.parents[result[0]])
        return result

    @property
    def leaves(self) -> list[int]:
        return sorted(set(range(len(self.parents))) - set(self.parents))


def random_tree(random: Random) -> Tree:
    """1 … 64 rows, few rows more often than many."""
    num_rows = min(64, int(random.choice((1, 2, 3, 5, 8, 12, 20, 40, 64)) * random.uniform(1, 1.5)))
    shape = random.choice(("chain", "comb", "binary", "star", "random", "recent"))
    parents = [-1]
    for row in range(1, num_rows):
        parents.append(
            {
                "chain": row - 1,
                "comb": row - 2 + row % 2 if row > 1 else 0,  # a spine with a tooth at each row of it
                "binary": (row - 1) // 2,
                "star": -1,
                "random": random.randrange(-1, row),
                "recent": random.randrange(max(-1, row - 4), row),
            }[shape]
        )
    return Tree([random.randrange(256) for _ in range(num_rows)], parents)


def prompt(length: int) -> list[int]:
    return [Random(length * 1000 + i).randrange(256) for i in range(length)]


class Prompts:
    """Sequences of a runner that begin with `prompt(length)`, which is computed once for each length."""

    def __init__(self, runner: OneSequence) -> None:
        self.runner = runner
        self._prompts: dict[int, Sequence] = {}

    def begin(self, length: int) -> Sequence:
        if length not in self._prompts:
            self._prompts[length] = self.runner.new_sequence()
            extend(self.runner, self._prompts[length], prompt(length))
        return self.runner.branch(self._prompts[length])


class Oracle(Prompts):
    """Logits of plain chains."""

    def logits(self, length: int, *chains: list[int]) -> list[np.ndarray]:
        """For each chain that follows `prompt(length)` float32 [tokens, vocab], after each of its tokens."""
        sequences = [self.begin(length) for _ in chains]
        segments = [
            Segment(sequence, chain, wanted=range(len(chain)))
            for sequence, chain in zip(sequences, chains, strict=True)
        ]
        result: list[np.ndarray] = []
        while segments:
            num_fitting = 1
            while sum(len(each.token_ids) for each in segments[: num_fitting + 1]) <= self.runner.chunk_size:
                if num_fitting == len(segments):
                    break
                num_fitting += 1
            result += self.runner.step(Batch(tuple(segments[:num_fitting])))
            segments = segments[num_fitting:]
        for sequence in sequences:
            self.runner.release(sequence)
        return result


def extend(runner: OneSequence, sequence: Sequence, token_ids: list[int]) -> None:
    """Appends tokens, if there are any, in one step."""
    if token_ids:
        runner.step(Batch((Segment(sequence, token_ids, wanted=()),)))


def assert_tree(oracle: Oracle, length: int, tree: Tree, logits: np.ndarray) -> None:
    """logits [rows, vocab] of the tree's rows are those of plain decoding."""
    assert logits.shape == (len(tree.parents), oracle.runner.spec.vocab_size)
    paths = [tree.path(leaf) for leaf in tree.leaves]
    plain = oracle.logits(length, *([tree.token_ids[row] for row in path] for path in paths))
    for path, expected in zip(paths, plain, strict=True):
        assert np.array_equal(logits[path], expected), (length, tree, path)


def check_batch_of_trees(
    prompts: Prompts,
    oracle: Oracle,
    random: Random,
    num_trees: int = 5,
    lengths_of_prompts: tuple[int, ...] = LENGTHS,
) -> None:
    """Trees and two chains in one step; a path of each is committed; then all go on together."""
    runner = prompts.runner
    lengths = [random.choice(lengths_of_prompts) for _ in range(num_trees + 2)]
    trees = [random_tree(random) for _ in range(num_trees)]
    chains = [prompt(7)[: random.randint(1, 7)] for _ in range(2)]
    sequences = [prompts.begin(length) for length in lengths]
    segments = [Segment(s, t.token_ids, t.parents) for s, t in zip(sequences, trees, strict=False)]
    segments += [Segment(s, ids) for s, ids in zip(sequences[num_trees:], chains, strict=True)]
    order = random.sample(range(len(segments)), len(segments))
    found = runner.step(Batch(tuple(segments[i] for i in order)))
    logits = {i: np.array(each) for i, each in zip(order, found, strict=True)}
    histories = []
    for i, tree in enumerate(trees):
        assert_tree(oracle, lengths[i], tree, logits[i])
        path = random.choice([[], *(tree.path(row) for row in range(len(tree.parents)))])
        runner.commit(sequences[i], path)
        histories.append([tree.token_ids[row] for row in path])
    assert_same_continuations(runner, oracle, sequences, lengths, histories + chains)
    for sequence in sequences:
        runner.release(sequence)


def assert_same_continuations(
    runner: OneSequence,
    oracle: Oracle,
    sequences: list[Sequence],
    lengths: list[int],
    histories: list[list[int]],
) -> None:
    """Sequence i, which is `prompt(lengths[i])` and `histories[i]`, goes on as plain decoding does."""
    next_ids = [3, 1, 4, 1, 5, 9, 2, 6][:NUM_NEXT]
    rows = [step_rows(runner, sequences, [token] * len(sequences)) for token in next_ids]
    for i, (length, history) in enumerate(zip(lengths, histories, strict=True)):
        (expected,) = oracle.logits(length, history + next_ids)
        actual = np.stack([row[i] for row in rows])
        assert np.array_equal(actual, expected[len(history) :]), (length, history)
