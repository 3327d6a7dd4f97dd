"""Random draft trees, and plain decoding along their paths."""

from dataclasses import dataclass
from random import Random

import numpy as np
from one_sequence import OneSequence, chosen_after, step_rows

from coldstream.decoding import SamplingParams
from coldstream.kvcache import Batch, Segment, Sequence

# Around blocks of 64 positions and chunks of 256, where a tree begins in one and ends in another.
LENGTHS = (0, 1, 5, 63, 64, 65, 130, 191, 193, 254, 255, 256, 257, 300, 449, 500)
CONTEXT = 640
NUM_NEXT = 8  # tokens after a commit
SAMPLED = SamplingParams(temperature=1.0)  # so that random weights do not say the same token for ever


class Difference(AssertionError):
    """A row has other bits than plain decoding."""


@dataclass
class Compared:
    """What had the bits of plain decoding."""

    trees: int = 0
    rows: int = 0  # of trees
    next_tokens: int = 0
    logits: int = 0  # values

    def add(self, other: "Compared") -> None:
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


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
    """1 … 64 rows, small numbers more often than large ones."""
    num_rows = min(64, int(random.choice((1, 2, 3, 5, 8, 12, 20, 40, 64)) * random.uniform(1, 1.5)))
    shape = random.choice(("chain", "comb", "full", "binary", "star", "random", "recent"))
    if shape == "full":  # all leaves at one depth
        num_rows = 2 ** ((num_rows + 1).bit_length() - 1) - 1
    parents = [-1]
    for row in range(1, num_rows):
        parents.append(
            {
                "chain": row - 1,
                "comb": row - 2 + row % 2 if row > 1 else 0,  # a spine with a tooth at each row of it
                "full": (row - 1) // 2,
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
        return self.runner.fork(self._prompts[length])


class Oracle(Prompts):
    """Logits of plain chains, each of which is computed once."""

    def __init__(self, runner: OneSequence) -> None:
        super().__init__(runner)
        self._known: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}

    def logits(self, length: int, *chains: list[int]) -> list[np.ndarray]:
        """For each chain that follows `prompt(length)` float32 [tokens, vocab], after each of its tokens."""
        keys = [(length, tuple(chain)) for chain in chains]
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        found = self.compute(length, *(list(chain) for _, chain in new))
        self._known.update((key, np.array(each)) for key, each in zip(new, found, strict=True))
        return [self._known[key] for key in keys]

    def compute(self, length: int, *chains: list[int]) -> list[np.ndarray]:
        """As `logits`, whatever is known."""
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


class TokenByToken(Oracle):
    """The same from steps of one row, each chain on its own."""

    def compute(self, length: int, *chains: list[int]) -> list[np.ndarray]:
        result = []
        for chain in chains:
            sequence = self.begin(length)
            result.append(np.concatenate([step_rows(self.runner, [sequence], [token]) for token in chain]))
            self.runner.release(sequence)
        return result


def extend(runner: OneSequence, sequence: Sequence, token_ids: list[int]) -> None:
    """Appends tokens, if there are any, in one step."""
    if token_ids:
        runner.step(Batch((Segment(sequence, token_ids, wanted=()),)))


def first_difference(actual: np.ndarray, expected: np.ndarray) -> int | None:
    """The first row of float32 [rows, vocab] that has other bits, or a number that is not finite."""
    is_same = (actual.view(np.uint32) == expected.view(np.uint32)) & np.isfinite(actual)
    differing = np.flatnonzero(~is_same.all(axis=1))
    return int(differing[0]) if differing.size else None


def assert_tree(oracle: Oracle, length: int, tree: Tree, logits: np.ndarray) -> None:
    """logits [rows, vocab] of the tree's rows are those of plain decoding. Raises Difference."""
    assert logits.shape == (len(tree.parents), oracle.runner.spec.vocab_size)
    paths = [tree.path(leaf) for leaf in tree.leaves]
    plain = oracle.logits(length, *([tree.token_ids[row] for row in path] for path in paths))
    for path, expected in zip(paths, plain, strict=True):
        at = first_difference(logits[path], expected)
        if at is not None:
            raise Difference(f"row {path[at]} on the path {path} of {tree}, behind {length} tokens")


def check_batch_of_trees(
    prompts: Prompts,
    oracle: Oracle,
    random: Random,
    num_trees: int = 5,
    lengths_of_prompts: tuple[int, ...] = LENGTHS,
    num_next: int = NUM_NEXT,
) -> Compared:
    """Trees and two chains in one step; a path of each is committed; then all go on together.

    Raises Difference.
    """
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
    compared = check_continuations(
        runner, oracle, random, sequences, lengths, histories + chains, num_next=num_next
    )
    for sequence in sequences:
        runner.release(sequence)
    num_rows = sum(len(tree.parents) for tree in trees)
    compared.add(Compared(len(trees), num_rows, 0, num_rows * runner.spec.vocab_size))
    return compared


def check_continuations(
    runner: OneSequence,
    oracle: Oracle,
    random: Random,
    sequences: list[Sequence],
    lengths: list[int],
    histories: list[list[int]],
    *,
    num_next: int = NUM_NEXT,
) -> Compared:
    """Sequence i, which is `prompt(lengths[i])` and `histories[i]`, goes on as plain decoding does.

    All of them step by step together; each says what is sampled from its own logits. Raises Difference.
    """
    next_ids = [[random.randrange(256)] for _ in sequences]
    rows = []
    for _ in range(num_next):
        rows.append(step_rows(runner, sequences, [ids[-1] for ids in next_ids]))
        for seed, (ids, logits) in enumerate(zip(next_ids, rows[-1], strict=True)):
            ids.append(chosen_after(logits, ids, SAMPLED, seed))
    for i, (length, history) in enumerate(zip(lengths, histories, strict=True)):
        said = next_ids[i][:num_next]
        (expected,) = oracle.logits(length, history + said)
        at = first_difference(np.stack([row[i] for row in rows]), expected[len(history) :])
        if at is not None:
            raise Difference(
                f"token {at} of {said} behind {length} tokens and the committed {history}: sequence {i} of "
                f"{len(sequences)} in the batch"
            )
    count = num_next * len(sequences)
    return Compared(next_tokens=count, logits=count * runner.spec.vocab_size)


def check_mixed_lengths(
    prompts: Prompts, oracle: Oracle, random: Random, num_sequences: int, num_next: int = NUM_NEXT
) -> Compared:
    """So many sequences of lengths around the ends of blocks and chunks, in each step of one batch, go on as
    each does alone. Raises Difference.
    """
    lengths = [random.choice(LENGTHS) for _ in range(num_sequences)]
    sequences = [prompts.begin(length) for length in lengths]
    nothing: list[list[int]] = [[] for _ in lengths]
    compared = check_continuations(
        prompts.runner, oracle, random, sequences, lengths, nothing, num_next=num_next
    )
    for sequence in sequences:
        prompts.runner.release(sequence)
    return compared
