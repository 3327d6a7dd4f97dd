"""The drafter over a model's own block, beside the trunk that verifies its trees."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from mtp_cases import Reference, keys_and_values, write_variant
from runner_cases import token_ids

from bench.runners import open_cpu_runner
from coldstream.assets import demo_model_path
from coldstream.decoding.drafters.mtp import MtpDrafter
from coldstream.decoding.token_tree import TokenTree
from coldstream.decoding.tree_builder import top_log_probs
from coldstream.gguf import Tokenizer
from coldstream.kvcache import Batch, CacheSize, Segment
from coldstream.models.cpu.mtp import CpuMtp, MtpSequence
from coldstream.models.cpu.runner import CpuRunner

CONTEXT = 700
MAX_WAITING = 256  # by default
NAMES = ("moe", "qwen3next", "own tables", "streams", "streams, n-grams")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small cost more to share out than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def open_runner(path: Path) -> CpuRunner:
    return open_cpu_runner(
        path, threads=2, context_length=CONTEXT, cache_size=CacheSize.of(2, CONTEXT, num_trees=1)
    )


class Drafted:
    """A sequence of the trunk and its drafter."""

    def __init__(self, runner: CpuRunner, block: CpuMtp, **options: object) -> None:
        self.runner, self.sequence = runner, runner.new_sequence()
        self.rows: MtpSequence = block.new_sequence()
        self.drafter = MtpDrafter(self.rows, **options)  # type: ignore[arg-type]
        self.tokens: list[int] = []

    def extend(self, token_ids: list[int], chunk_size: int = CONTEXT) -> None:
        """A prompt, in runs of the trunk of at most `chunk_size`."""
        for start in range(0, len(token_ids), chunk_size):
            chunk = token_ids[start : start + chunk_size]
            self.runner.extend(self.sequence, chunk, None, self.drafter.extend)
            self.tokens += chunk

    def propose(self, root: int, budget: int = 12) -> TokenTree:
        return self.drafter.propose([*self.tokens, root], budget)

    def verify(self, root: int, tree: TokenTree, nodes: list[int]) -> None:
        """The root, and a path of the tree."""
        parents = [-1, *(parent + 1 for parent in tree.parents)]
        token_ids, rows = [root, *tree.token_ids], [0, *(node + 1 for node in nodes)]
        self.runner.step(Batch((Segment(self.sequence, token_ids, parents),)))
        hidden = self.runner.hidden(rows)
        self.runner.commit(self.sequence, rows)
        accepted = [token_ids[row] for row in rows]
        self.drafter.extend(accepted, hidden)
        self.tokens += accepted


def random_path(tree: TokenTree, random: Random) -> list[int]:
    path: list[int] = []
    while children := [i for i, parent in enumerate(tree.parents) if parent == (path[-1] if path else -1)]:
        if random.random() < 0.25:
            break
        path.append(random.choice(children))
    return path


def check_rows(drafted: Drafted, block: CpuMtp) -> None:
    """Those of a drafter that observed all tokens at once, for any root."""
    fresh = Drafted(drafted.runner, block)
    drafted.propose(7)
    fresh.extend(drafted.tokens)
    fresh.propose(7)
    assert drafted.rows.length == fresh.rows.length == len(drafted.tokens)
    assert np.array_equal(keys_and_values(block, drafted.rows), keys_and_values(block, fresh.rows))
    fresh.drafter.truncate(0)
    fresh.runner.release(fresh.sequence)


@pytest.mark.sharded
@pytest.mark.parametrize("name", [*NAMES, "demo"])
def test_catch_up_uses_the_trunks_states_whatever_is_accepted(tmp_path: Path, name: str) -> None:
    """States of the draft, and rows of what was rejected, leave no trace."""
    path = demo_model_path() if name == "demo" else write_variant(tmp_path, name)
    random = Random(f"paths of {name}")
    with open_runner(path) as runner:
        block = runner.load_mtp()
        drafted = Drafted(runner, block, max_steps=4, min_followed=0.0)
        drafted.extend(token_ids(20))
        lengths = set()
        for pass_ in range(24):
            root = random.randrange(256)
            tree = drafted.propose(root)
            path_ = random_path(tree, random)
            lengths.add(len(path_))
            drafted.verify(root, tree, path_)
            if pass_ % 6 == 5:
                check_rows(drafted, block)
        assert lengths >= {0, 1}
        assert max(lengths) > 1


@pytest.mark.sharded
@pytest.mark.parametrize("chunk_size", [1, 7, 300])
def test_chunks_of_a_prompt_change_nothing(tmp_path: Path, chunk_size: int) -> None:
    with open_runner(write_variant(tmp_path, "moe")) as runner:
        block = runner.load_mtp()
        drafted = Drafted(runner, block)
        drafted.extend(token_ids(CONTEXT - 60), chunk_size)
        drafted.propose(7)
        fresh = Drafted(runner, block)
        fresh.extend(drafted.tokens)
        fresh.propose(7)
        assert drafted.rows.length == fresh.rows.length == MAX_WAITING
        assert np.array_equal(keys_and_values(block, drafted.rows), keys_and_values(block, fresh.rows))


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("name", NAMES)
def test_states_after_the_last_norm_come_from_the_trunk_and_within_the_chain(
    tmp_path: Path, name: str
) -> None:
    """To the last bit: the draft is what the definition says, from its own trunk."""
    path, ids, depth = write_variant(tmp_path, name), token_ids(9), 5
    reference = Reference(path, exact=True, kv_type="i16")
    hidden = reference.feed_trunk(ids[:-1])
    outputs = reference.feed_block(ids[1:], hidden)
    expected: list[tuple[int, float]] = []
    for _ in range(depth):
        (tokens,), (log_probs,) = top_log_probs(outputs.logits[-1:], 1)
        before = expected[-1][1] if expected else 0.0
        expected.append((int(tokens[0]), before + float(log_probs[0])))
        outputs = reference.feed_block([expected[-1][0]], outputs.states[-1:])
    with open_runner(path) as runner:
        drafted = Drafted(runner, runner.load_mtp(branching=1), max_steps=depth, min_followed=0.0)
        drafted.extend(ids[:-1])
        tree = drafted.propose(ids[-1])
    assert tree.parents == (-1, 0, 1, 2, 3)
    assert list(tree.token_ids) == [token for token, _ in expected]
    assert np.allclose(tree.log_probs, [log_prob for _, log_prob in expected], atol=1e-5)


def test_it_drafts_up_to_the_end_of_the_context(tmp_path: Path) -> None:
    with open_runner(write_variant(tmp_path, "moe")) as runner:
        drafted = Drafted(
            runner, runner.load_mtp(branching=1), max_steps=4, min_followed=0.0, max_waiting=CONTEXT
        )
        drafted.extend(token_ids(CONTEXT - 3))
        for room in (3, 2, 1):
            assert len(drafted.propose(1)) == 1 + room
            drafted.verify(1, TokenTree(), [])
        assert drafted.sequence.length == CONTEXT
        assert len(drafted.propose(1)) == 1


@pytest.mark.sharded(of="models on the CPU")
def test_trap_46_the_demo_models_block_knows_what_its_trunk_will_say() -> None:
    """Of greedy text; with a state of another position, or before its norm, far less would agree."""
    source = Path(argparse.__file__).read_text()
    with open_runner(demo_model_path()) as runner:
        prompt = Tokenizer.from_metadata(runner.file.metadata).encode(source)[:200]
        drafted = Drafted(runner, runner.load_mtp(branching=1), max_steps=2, min_followed=0.0)
        drafted.extend(prompt)
        plain = runner.new_sequence()
        logits = runner.extend(plain, prompt)
        greedy: list[int] = []
        for _ in range(102):
            greedy.append(int(logits.argmax()))
            logits = runner.extend(plain, greedy[-1:])
        agreed = np.zeros(2)
        for i, root in enumerate(greedy[:100]):
            tree = drafted.propose(root)
            agreed += np.cumprod(np.array(tree.token_ids) == greedy[i + 1 : i + 3])
            drafted.verify(root, TokenTree(), [])
    assert agreed[0] > 70
    assert agreed[1] > 40


NUM_DRAFTS = 60
# Nodes of so many drafts. They are the same on any machine, and recorded anew for another demo model.
ACCEPTED = {"chain": 145, "tree": 170}
TEXT = "import os\nimport sys\n\n\ndef main() -> None:\n    "


def accepted_of(tree: TokenTree, following: list[int]) -> int:
    """Nodes along the path that agrees with what follows."""
    node, count = -1, 0
    for token in following:
        child = tree.child(node, token)
        if child is None:
            break
        node, count = child, count + 1
    return count


@pytest.mark.sharded(of="models on the CPU")
def test_sp09_a_tree_is_accepted_as_far_as_its_spine_and_further() -> None:
    """At every place of a greedy text the spine of a tree is the chain.

    So as many nodes of the spine are accepted, and of the tree no fewer. The sums are the recorded ones on
    any machine.
    """
    with open_runner(demo_model_path()) as runner:
        prompt = Tokenizer.from_metadata(runner.file.metadata).encode(TEXT)
        plain = runner.new_sequence()
        logits, greedy = runner.extend(plain, prompt), []
        for _ in range(NUM_DRAFTS + 4):
            greedy.append(int(logits.argmax()))
            logits = runner.extend(plain, greedy[-1:])
        runner.release(plain)
        options = {"max_steps": 4, "min_followed": 0.0}
        chains, trees = (Drafted(runner, runner.load_mtp(branching=wide), **options) for wide in (1, 4))
        chains.extend(prompt)
        trees.extend(prompt)
        counts: dict[str, list[int]] = {"chain": [], "tree": []}
        for i, root in enumerate(greedy[:NUM_DRAFTS]):
            chain, tree = chains.propose(root), trees.propose(root, 63)
            following = greedy[i + 1 : i + 5]
            assert len(tree) > len(chain) == 4
            spine = [tree.child(-1, chain.token_ids[0])]
            for token in chain.token_ids[1:]:
                spine.append(tree.child(spine[-1], token))
            assert None not in spine
            counts["chain"].append(accepted_of(chain, following))
            counts["tree"].append(accepted_of(tree, following))
            assert counts["tree"][-1] >= counts["chain"][-1]
            chains.verify(root, TokenTree(), [])
            trees.verify(root, TokenTree(), [])
    for kind, each in counts.items():
        assert abs(sum(each) / ACCEPTED[kind] - 1) <= 0.02, kind
