"""What trains the demo model's drafter: the engine's own forward, text of the model, a run that goes on."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.assets import demo_model_path
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import tensor_shapes
from dflash_reference import DflashModel
from tools.train_demo import convert, data, drafter_convert, tokenizer
from tools.train_demo.__main__ import with_settings
from tools.train_demo.drafter_convert import convert_drafter, load_drafter, write_drafter
from tools.train_demo.drafter_evaluate import Chain, evaluate_drafter, opened_with
from tools.train_demo.drafter_model import DrafterConfig, DrafterModel, gguf_name
from tools.train_demo.drafter_run import DrafterRun, load_target, train_drafter
from tools.train_demo.drafter_train import (
    DrafterTrainConfig,
    DrafterTrainer,
    Target,
    accepted_by_depth,
    draft_losses,
    drafted_line,
    embedded,
)
from tools.train_demo.features import Windows, agreement, features_after, windows_of
from tools.train_demo.model import DemoConfig, DemoModel
from tools.train_demo.own_text import Decoder, OwnTextConfig, drawn, prompts, write_windows
from tools.train_demo.train import Tokens

SHAPE = DemoConfig(
    vocab_size=512,
    num_layers=4,
    num_experts=8,
    expert_ffn_size=32,
    shared_expert_ffn_size=256,
    context_length=512,
)
TINY = DrafterConfig(
    hidden_size=64,
    vocab_size=96,
    aux_layers=(0, 2),
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=96,
    block_size=5,
    mask_id=95,
    window=9,
    selector_rank=8,
    selector_top_k=4,
)
FIRST = dataclasses.replace(TINY, selector_rank=0)
TEXT = Path(data.__file__).read_text() + Path(convert.__file__).read_text()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_drafter(config: DrafterConfig, seed: int = 0) -> DrafterModel:
    """With norms away from one, convolutions away from the identity, and pairs that have scores."""
    torch.manual_seed(seed)
    model = DrafterModel(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("_conv.base") or "cessor" in name:
            parameter.data.normal_(std=0.5)
    return model.eval()


def random_target(config: DrafterConfig, seed: int = 0) -> Target:
    rng = torch.Generator().manual_seed(seed)
    shape = (config.vocab_size, config.hidden_size)
    return Target(torch.randn(shape, generator=rng), 0.3 * torch.randn(shape, generator=rng))


def engine_model(path: Path, target: Target) -> DflashModel:
    with DflashFile.open(path) as file:
        return DflashModel.load(
            file, lambda ids: target.token_embd[list(ids)], lambda hidden: hidden @ target.output.T
        )


@pytest.mark.parametrize(
    "config",
    [TINY, FIRST, dataclasses.replace(TINY, is_causal=False)],
    ids=["second", "first", "bidirectional"],
)
def test_blocks_in_windows_are_what_the_engine_computes_one_by_one(
    tmp_path: Path, config: DrafterConfig
) -> None:
    model, target = random_drafter(config), random_target(config)
    write_drafter(tmp_path / "drafter.gguf", model.state_dict(), config, quantised=False)
    engine = engine_model(tmp_path / "drafter.gguf", target)
    shapes = {gguf_name(name): tuple(value.shape) for name, value in model.state_dict().items()}
    assert shapes == tensor_shapes(engine.spec)
    rng = torch.Generator().manual_seed(1)
    features = torch.randn(2, 40, len(config.aux_layers) * config.hidden_size, generator=rng)
    token_ids = torch.randint(config.vocab_size, (2, 40), generator=rng)
    anchors = torch.tensor([[1, 7, 30], [9, 2, 35]])
    blocks = torch.stack(
        [token_ids[i, anchors[i, :, None] + torch.arange(config.block_size)] for i in (0, 1)]
    )
    with torch.no_grad():
        hidden = model(features, embedded(blocks, target, config), anchors)
    assert hidden.std() > 0.3
    for window in range(2):
        for number, anchor in enumerate(anchors[window].tolist()):
            sequence = engine.new_sequence()
            sequence.append(features[window, :anchor])
            anchor_id = int(token_ids[window, anchor])
            expected = sequence.hidden(anchor_id, config.block_size)
            torch.testing.assert_close(hidden[window, number], expected, rtol=0, atol=1e-4)
            lattice = sequence.draft(anchor_id, config.block_size, 1)
            line = drafted_line(model, target, hidden[window, number][None], torch.tensor([anchor_id]))[0]
            assert line.tolist() == greedy_line(lattice.token_ids, lattice.log_probs)


def greedy_line(token_ids: np.ndarray, log_probs: np.ndarray) -> list[int]:
    """The likeliest token after the one before, of a lattice."""
    line, rank = [], 0
    for depth, row in enumerate(token_ids):
        rank = int(np.argmax(log_probs[depth] if log_probs.ndim == 2 else log_probs[depth, rank]))
        line.append(int(row[rank]))
    return line


def test_losses_are_those_of_the_chances_of_the_target() -> None:
    """Row by row, without what saves memory."""
    model, target = random_drafter(TINY), random_target(TINY)
    rng = torch.Generator().manual_seed(2)
    windows = Windows(
        torch.randint(TINY.vocab_size, (3, 24), generator=rng).to(torch.int16),
        torch.randn(3, 24, 2 * TINY.hidden_size, generator=rng),
        torch.randn(3, 24, TINY.hidden_size, generator=rng),
        4,
        torch.tensor([True, False, True]),
    )
    chosen, anchors = torch.tensor([2, 0]), torch.tensor([[3], [11]])
    model.requires_grad_(requires_grad=False)
    losses = draft_losses(model, target, windows, chosen, anchors)
    for row in range(TINY.block_size - 1):
        nats = {"marginal": 0.0, "conditional": 0.0}
        for window, (anchor,) in zip(chosen.tolist(), anchors.tolist(), strict=True):
            ids = windows.token_ids[window, anchor : anchor + TINY.block_size].long()
            hidden = model(
                windows.features[window][None],
                embedded(ids[None, None], target, TINY),
                torch.tensor([[anchor]]),
            )[0, 0, row + 1]
            chances = (target.output @ windows.hidden[window, anchor + row]).softmax(-1)
            scores = target.output @ hidden
            nats["marginal"] -= float(chances @ scores.log_softmax(-1)) / 2
            scores = scores + model.pair_scores(hidden, ids[row])
            nats["conditional"] -= float(chances @ scores.log_softmax(-1)) / 2
        for name, expected in nats.items():
            assert float(losses[name][row]) == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def target_model() -> DemoModel:
    """A tiny model with weights larger than at initialisation, so that it prefers some tokens."""
    torch.manual_seed(3)
    model = DemoModel(SHAPE)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and name != "token_embd.weight":
            parameter.data *= 3
    return model.eval()


@pytest.fixture(scope="module")
def stream() -> Tokens:
    tiny = tokenizer.train_tokenizer([TEXT], SHAPE.vocab_size)
    pieces = [data.SourceFile(str(i), TEXT[i : i + 1500]) for i in range(0, 6000, 1500)]
    return Tokens(*tokenizer.encode_documents(tiny, pieces), 6000)


def test_token_by_token_is_what_whole_windows_are(target_model: DemoModel, stream: Tokens) -> None:
    ids = torch.from_numpy(stream.ids[:128].astype(np.int64)).view(2, 64)
    features, hidden = features_after(target_model, ids, (1, 3))
    expected = target_model.output(target_model(ids, ids).hidden)
    torch.testing.assert_close(target_model.output(hidden), expected)
    assert features.shape == (2, 64, 2 * SHAPE.hidden_size)
    decoder = Decoder(target_model, 2, 64)
    for position in range(64):
        logits = decoder.step(ids[:, position])
        torch.testing.assert_close(logits, expected[:, position], rtol=0, atol=1e-3)


def test_written_windows_follow_the_model(target_model: DemoModel, stream: Tokens) -> None:
    config = OwnTextConfig(num_windows=6, length=64, prompt_length=40, batch_windows=4)
    ids, greedy = write_windows(target_model, stream, config)
    again, _ = write_windows(target_model, stream, config)
    assert np.array_equal(ids, again)
    assert greedy.sum() == 3
    corpus = stream.ids.tobytes()
    assert all(row[:40].tobytes() in corpus for row in ids)
    tokens = torch.from_numpy(ids.astype(np.int64))
    choices = target_model.output(target_model(tokens, tokens).hidden).argmax(-1)[:, 39:-1].numpy()
    agrees = (choices == ids[:, 40:]).all(axis=1)
    assert agrees[greedy].all()
    assert not agrees[~greedy].any()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_drawn_tokens_are_likely_ones(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(8, 100, generator=rng)
    chosen = drawn(logits, rng)
    assert chosen.shape == (8,)
    assert (logits.gather(1, chosen[:, None]) >= logits.amax(-1, keepdim=True) + np.log(0.05)).all()


def test_prompts_lie_within_documents_where_these_are_long_enough(stream: Tokens) -> None:
    rows = prompts(stream, 200, 100, np.random.default_rng(0))
    separator = stream.ids[0]
    assert not (rows[:, 1:] == separator).any()


def test_features_of_the_engine_are_near_those_of_pytorch(tmp_path: Path) -> None:
    """On the bundled model: the engine rounds activations to 8 bits, PyTorch does not."""
    shape = dataclasses.replace(TINY, hidden_size=256, vocab_size=6144, mask_id=6141, aux_layers=(1, 3, 5, 7))
    write_drafter(tmp_path / "drafter.gguf", random_drafter(shape).state_dict(), shape)
    model = load_target(demo_model_path(), DemoConfig(), torch.device("cpu"))
    with opened_with(demo_model_path(), tmp_path / "drafter.gguf", threads=2) as opened:
        assert isinstance(opened.runner, CpuRunner)
        ids = opened.tokenizer.encode(TEXT[:1200])
        found = agreement(model, opened.runner, np.array(ids), shape.aux_layers)
    assert min(found["mean_cosine"]) > 0.999
    assert max(found["relative_error"]) < 0.05


def counting(target: Target, num_windows: int, length: int) -> Windows:
    """Texts that count up, each token followed by the next one, and a target that is sure of that."""
    vocab_size = len(target.output) - 1  # without the mask
    token_ids = (torch.arange(num_windows)[:, None] * 5 + torch.arange(length)) % vocab_size
    following = target.output[(token_ids + 1) % vocab_size]
    features = torch.zeros(num_windows, length, 2 * TINY.hidden_size)
    greedy = torch.ones(num_windows, dtype=torch.bool)
    return Windows(token_ids.to(torch.int16), features, 4 * following, 2, greedy)


@pytest.mark.sharded(of="measurements")
def test_it_learns_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    target = random_target(TINY)
    windows = counting(target, 19, 32)
    config = DrafterTrainConfig(
        batch_windows=8, anchors=8, learning_rate=0.01, warmup_steps=5, total_seconds=1e9, total_steps=60
    )
    whole = DrafterTrainer(TINY, config, target, tmp_path / "whole")
    figures = whole.run(windows, windows, 1e9)
    assert figures["step"] == 60
    assert min(figures["accepted_greedy"]) > 0.8
    for _ in range(2):
        part = DrafterTrainer(TINY, config, target, tmp_path / "parts")
        part.run(windows, windows, 1e9, max_steps=30)
    assert part.step == 60
    for name, value in part.model.state_dict().items():
        torch.testing.assert_close(value, whole.model.state_dict()[name])
    other = dataclasses.replace(TINY, num_layers=1)
    with pytest.raises(ValueError, match="is of another shape: name another folder"):
        DrafterTrainer(other, config, target, tmp_path / "parts")


def test_from_a_model_and_tokens_to_a_file_that_the_engine_reads(
    tmp_path: Path, target_model: DemoModel, stream: Tokens
) -> None:
    tiny = tokenizer.train_tokenizer([TEXT], SHAPE.vocab_size)
    convert.write_gguf(tmp_path / "model.gguf", target_model.state_dict(), SHAPE, tiny, quantised=False)
    arrays = {"ids": stream.ids, "starts": stream.starts, "bytes": np.int64(stream.num_bytes)}
    arrays = {f"{part}_{key}": value for part in ("train", "held_out") for key, value in arrays.items()}
    np.savez(tmp_path / "tokens.npz", **arrays)
    shape = dataclasses.replace(
        TINY, hidden_size=256, vocab_size=512, mask_id=511, aux_layers=(1, 3), num_layers=1
    )
    run = DrafterRun(
        shape,
        OwnTextConfig(num_windows=8, length=64, prompt_length=32, batch_windows=8),
        DrafterTrainConfig(batch_windows=2, anchors=2, total_seconds=1e9, total_steps=3),
        minutes=1e6,
        max_steps=2,
    )
    folder = tmp_path / "drafter"
    arguments = (tmp_path / "tokens.npz", tmp_path / "model.gguf", folder, run, SHAPE)
    figures = [train_drafter(*arguments) for _ in range(2)]
    assert [each["step"] for each in figures] == [2, 3]
    log = [json.loads(line) for line in (folder / "drafter.jsonl").read_text().splitlines()]
    assert log == figures
    convert_drafter(folder, tmp_path / "drafter.gguf")
    config, state = load_drafter(folder)
    assert config == shape
    engine = engine_model(tmp_path / "drafter.gguf", Target.of(target_model))
    assert engine.spec.mask_id == 511
    model = DrafterModel(shape).eval()
    model.load_state_dict(state)
    windows = windows_of(target_model, *own_windows(folder), 32, (1, 3), torch.float32)
    found = accepted_by_depth(model, Target.of(target_model), windows, is_greedy=True)
    assert found == figures[-1]["accepted_greedy"]


def test_a_file_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_convert, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ValueError, match="the limit is 1000"):
        write_drafter(tmp_path / "drafter.gguf", random_drafter(TINY).state_dict(), TINY)


def own_windows(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(folder / "own_text.npz") as file:
        return file["held_out_ids"], file["held_out_greedy"]


class Fixed:
    """Proposes a tree, whatever the context."""

    name, wants_hidden, aux_layers = "fixed", False, ()

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree

    def truncate(self, length: int) -> None: ...

    def extend(self, token_ids: Sequence[int], hidden: object) -> None: ...

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        return self.tree.first(budget)


def test_a_chain_is_the_likeliest_line_of_a_tree() -> None:
    tree = TokenTree((5, 6, 7, 8, 9), (-1, -1, 0, 1, 2), (-0.1, -0.2, -0.3, -0.4, -0.5))
    chain = Chain(Fixed(tree))
    assert chain.propose([1], 9) == TokenTree((5, 7, 9), (-1, 0, 1), (-0.1, -0.3, -0.5))
    assert chain.propose([1], 2) == TokenTree((5, 7), (-1, 0), (-0.1, -0.3))
    assert not Chain(Fixed(NO_DRAFT)).propose([1], 2)


def test_every_way_of_drafting_the_bundled_model_is_measured(tmp_path: Path) -> None:
    shape = dataclasses.replace(TINY, hidden_size=256, vocab_size=6144, mask_id=6141, num_layers=1)
    write_drafter(tmp_path / "drafter.gguf", random_drafter(shape).state_dict(), shape)
    arguments = (demo_model_path(), tmp_path / "drafter.gguf", tmp_path / "found.json")
    found = evaluate_drafter(*arguments, num_files=1, new_tokens=12)
    assert json.loads((tmp_path / "found.json").read_text())["results"] == found
    ways = {(each["sampling"], each["drafter"], each["shape"], each["nodes"]) for each in found}
    assert len(ways) == len(found) == 2 * 3 * 9
    for each in found:
        assert 1 <= each["tokens_per_step"] == pytest.approx(1 + sum(each["accepted_by_depth"]), abs=0.01)
        assert len(each["accepted_by_depth"]) <= each["nodes"]
    greedy = {each["drafter"]: each for each in found if each["sampling"] == "greedy" and each["nodes"] == 3}
    assert greedy["mtp"]["tokens_per_step"] > 1.3


def test_both_files_may_have_40_mb_together() -> None:
    assert convert.MAX_FILE_BYTES + drafter_convert.MAX_FILE_BYTES <= 40_000_000


def test_settings_reach_fields_of_fields() -> None:
    run = with_settings(
        DrafterRun(),
        ["shape.aux_layers=1,7", "shape.is_causal=false", "training.learning_rate=0.5", "minutes=2"],
    )
    assert run.shape.aux_layers == (1, 7)
    assert run.shape.is_causal is False
    assert run.training.learning_rate == 0.5
    assert run.minutes == 2.0
    with pytest.raises(SystemExit, match="DrafterConfig has no field width"):
        with_settings(DrafterRun(), ["shape.width=3"])
