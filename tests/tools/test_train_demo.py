"""The pieces that made the bundled model: split, tokenizer, delta rule, rounding, conversion, training."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tools.llama_cpp import open_session, quantize
from tools.train_demo import convert, data, file_types, tokenizer
from tools.train_demo.checkpoint import load_checkpoint, save_checkpoint
from tools.train_demo.delta_net import CHUNK, delta_rule_chunked, delta_rule_recurrent
from tools.train_demo.fake_quant import FAKE
from tools.train_demo.held_out import bits_per_byte, scoring_windows
from tools.train_demo.measure import Measurement, round_int8
from tools.train_demo.model import DemoConfig, DemoModel
from tools.train_demo.muon import orthogonalise
from tools.train_demo.read_back import dequantised_state
from tools.train_demo.train import Tokens, TrainConfig, epoch_windows, rounded_weights, train

ASSET = Path(convert.__file__).parents[2] / "src/coldstream/assets/demo.gguf"
TINY = DemoConfig(
    vocab_size=512,
    num_layers=4,
    num_experts=8,
    expert_ffn_size=32,
    shared_expert_ffn_size=256,
    context_length=512,
)
TEXT = Path(data.__file__).read_text() + Path(convert.__file__).read_text() + Path(__file__).read_text()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny_tokenizer() -> Tokenizer:
    """A tokenizer of the tiny model's size, trained on these files."""
    return tokenizer.train_tokenizer([TEXT], TINY.vocab_size)


def random_state(seed: int) -> dict[str, torch.Tensor]:
    """A tiny model's weights, larger than at initialisation and with norms away from one."""
    torch.manual_seed(seed)
    model = DemoModel(TINY)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif parameter.ndim >= 2 and name != "token_embd.weight":
            parameter.data *= 3
    return model.state_dict()


def test_split_is_disjoint_pure_and_leaves_tables_out(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"module_{i}.py").write_text(f"# {i}\n" + "x = 1\n" * 20)
    (tmp_path / "copy_of_7.py").write_text((tmp_path / "module_7.py").read_text())
    for path in ("encodings/cp9.py", "pydoc_data/topics.py", "_sysconfigdata_x.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("decoding_table = 1\n" * 20)
    corpus = data.load_corpus(tmp_path)
    train_paths, held_out = ({f.path for f in part} for part in (corpus.train, corpus.held_out))
    assert not train_paths & held_out
    assert len(train_paths | held_out) == 200
    assert held_out == {p for p in train_paths | held_out if data.is_held_out(p)}
    assert 1 <= len(held_out) <= 20
    assert data.load_corpus(tmp_path) == corpus


def test_a_tokenizer_gives_text_and_ids_back(tiny_tokenizer: Tokenizer) -> None:
    text = "def f(x):\n\treturn 'é日本' + x[12]\r\n\n  # end   \n"
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text).ids) == text
    ids = [tiny_tokenizer.token_to_id(token) for token in tokenizer.CONTROL_TOKENS]
    assert ids == list(range(TINY.vocab_size - 3, TINY.vocab_size))
    stream, starts = tokenizer.encode_documents(
        tiny_tokenizer, [data.SourceFile("a", "x"), data.SourceFile("b", "y")]
    )
    assert stream[starts].tolist() == [ids[0], ids[0]]
    assert len(tokenizer.merges_of(tiny_tokenizer)) == TINY.vocab_size - 256 - 3


@settings(max_examples=12)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_chunked_delta_rule_equals_recurrence(seed: int, repeated: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    shape = (1, 2 * CHUNK, 2, 8)
    q, k, v = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(3))
    k = torch.where(torch.rand(shape[:3], generator=rng)[..., None] < repeated, k[:, :1], k)
    k = k / k.norm(dim=-1, keepdim=True)
    g = -3 * torch.rand(shape[:3], generator=rng, dtype=torch.float64)
    beta = torch.rand(shape[:3], generator=rng, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    expected, got = delta_rule_recurrent(*inputs), delta_rule_chunked(*inputs)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_chunked_delta_rule_gradients() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, CHUNK, 1, 4, dtype=torch.float64) for _ in range(3)]
    inputs += [-torch.rand(1, CHUNK, 1, dtype=torch.float64), torch.rand(1, CHUNK, 1, dtype=torch.float64)]
    inputs[1] = inputs[1] / inputs[1].norm(dim=-1, keepdim=True)
    inputs = [x.requires_grad_() for x in inputs]
    both = [
        torch.autograd.grad(rule(*inputs).square().sum(), inputs)
        for rule in (delta_rule_recurrent, delta_rule_chunked)
    ]
    for expected, got in zip(*both, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


@given(st.integers(1, 300), st.integers(1, 40).map(lambda half: 2 * half))
def test_scoring_windows_count_every_token_once_with_context(num_tokens: int, length: int) -> None:
    counted: Counter[int] = Counter()
    for window in scoring_windows(num_tokens, length):
        assert window.end - window.start <= length
        for index in range(window.first, window.end + 1):
            counted[index] += 1
            assert index - window.start > length // 2 or window.start == 0
    assert counted == Counter(range(1, num_tokens))


def test_bits_per_byte_of_a_uniform_guess() -> None:
    ids = np.arange(100, dtype=np.uint16)
    bits = bits_per_byte(ids, 50, 16, lambda inputs, targets: np.full(len(targets), -np.log(8)))
    assert bits == pytest.approx(3 * 99 / 50)


@pytest.mark.parametrize("kind", sorted(FAKE))
def test_rounding_is_about_as_good_as_the_real_quantiser(kind: str) -> None:
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    blocks = quantize(w.numpy(), int(convert.GGMLType[kind]))
    real = torch.from_numpy(convert.gguf.quants.dequantize(blocks, convert.GGMLType[kind]))
    real_error, fake_error = ((x - w).square().mean().sqrt() for x in (real, FAKE[kind](w)))
    assert 0 < fake_error < 1.35 * real_error
    assert torch.equal(FAKE[kind](torch.zeros(1, 256)), torch.zeros(1, 256))


def test_int8_rounding_is_per_group() -> None:
    x = torch.cat((torch.full((1, 256), 0.3), torch.tensor([[127.0, 0.3]])), dim=-1)
    rounded = round_int8(x, 256)
    torch.testing.assert_close(rounded[:, :256], x[:, :256])
    assert rounded[0, 256:].tolist() == [127.0, 0.0]


def test_orthogonalise_flattens_singular_values() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 32, 64)).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = random_state(3)
    save_checkpoint(tmp_path, state)
    back = load_checkpoint(tmp_path)
    assert back.keys() == state.keys()
    for name, value in state.items():
        assert (back[name] - value).abs().max() <= value.abs().max() / 200


@pytest.mark.sharded(of="measurements")
def test_converted_model_equals_llama_cpp(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    state = random_state(1)
    path = tmp_path / "tiny.gguf"
    convert.write_gguf(path, state, TINY, tiny_tokenizer, quantised=False)
    back = dequantised_state(path, TINY)
    assert back.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(back[name], value, rtol=1e-6, atol=0)
    model = DemoModel(TINY).eval()
    model.load_state_dict(state)
    ids = tiny_tokenizer.encode(TEXT[:2000]).ids[:256]
    with torch.no_grad():
        tokens = torch.tensor([ids])
        expected = model.output(model(tokens, tokens).hidden)[0].numpy()
    with open_session(path, 256) as session:
        assert session.vocabulary.encode(TEXT[:2000], add_special=False)[:256] == ids
        got = session.feed(ids)
    assert expected.std() > 0.5
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)


def test_quantised_types_and_size_limit(
    tmp_path: Path, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    state = random_state(2)
    size = convert.write_gguf(path, state, TINY, tiny_tokenizer)
    assert size == path.stat().st_size
    kinds = {t.name: t.tensor_type.name for t in convert.gguf.GGUFReader(str(path)).tensors}
    assert kinds["blk.0.ffn_gate_exps.weight"] == "Q4_K"
    assert kinds["blk.4.nextn.eh_proj.weight"] == "Q8_0"
    assert kinds["blk.3.attn_output.weight"] == "Q8_0"
    assert kinds["output.weight"] == "Q6_K"
    assert kinds["blk.0.ffn_gate_inp.weight"] == kinds["blk.0.ssm_alpha.weight"] == "F32"
    for name, value in dequantised_state(path, TINY).items():
        limit = 0.0 if file_types.stored_type(name) == "F32" and not name.endswith("ssm_a_log") else 0.2
        assert (value - state[name]).square().mean().sqrt() <= limit * state[name].square().mean().sqrt()
    monkeypatch.setattr(convert, "MAX_FILE_BYTES", size - 1)
    with pytest.raises(ValueError, match="the limit is"):
        convert.write_gguf(path, state, TINY, tiny_tokenizer)


@pytest.mark.sharded(of="measurements")
def test_training_learns_quantises_and_saves(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    ids, starts = tokenizer.encode_documents(tiny_tokenizer, [data.SourceFile("a", TEXT[:1500])])
    arrays = {"ids": ids, "starts": starts, "bytes": np.int64(1500)}
    arrays = {f"{part}_{key}": value for part in ("train", "held_out") for key, value in arrays.items()}
    np.savez(tmp_path / "t.npz", **arrays)
    config = TrainConfig(steps=8, batch_sequences=2, sequence_length=CHUNK, warmup_steps=2, dropout=0.0)
    shape = dataclasses.replace(TINY, num_layers=2, full_attention_interval=2, num_experts=4)
    figures = train(tmp_path / "t.npz", tmp_path / "weights", shape, config)
    record = json.loads((tmp_path / "weights/training.json").read_text())
    uniform_guess = 9 * len(ids) / 1500
    assert figures["held_out_bits_per_byte"] < 0.8 * uniform_guess
    assert record["figures"] == figures
    measured = Measurement(load_checkpoint(tmp_path / "weights"), shape, torch.device("cpu"))
    stream = Tokens(ids, starts, 1500)
    assert measured.bits_per_byte(stream) == pytest.approx(figures["held_out_bits_per_byte"], abs=0.1)
    assert 0 < measured.behaviour(stream)["routing_entropy_bits_per_block"][0] <= 2


def test_rounded_weights_come_back_exact() -> None:
    model = DemoModel(TINY)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with rounded_weights(model, enabled=True):
        assert not torch.equal(model.output.weight, before["output.weight"])
        assert torch.equal(model.output_norm.weight, before["output_norm.weight"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_epochs_hold_every_window_in_a_new_order() -> None:
    tokens = Tokens(np.arange(1000, dtype=np.uint16), np.array([0, 300, 700]), 1000)
    rng = np.random.default_rng(0)
    first, second = (epoch_windows(tokens, 64, rng) for _ in range(2))
    assert first.shape == second.shape == (15, 66)
    assert not np.array_equal(first, second)
    assert len(np.unique(first[:, :64])) == 15 * 64


@pytest.mark.sharded(of="measurements")
def test_bundled_model_fits_and_writes_python() -> None:
    assert ASSET.stat().st_size <= convert.MAX_FILE_BYTES
    with open_session(ASSET, 256, num_threads=1, float32_attention=False) as session:
        assert session.vocabulary.num_tokens == DemoConfig().vocab_size
        prompt = session.vocabulary.encode("class Stack:\n    def __init__(self):\n", add_special=False)
        out = session.greedy(prompt, 24)
    reader = convert.gguf.GGUFReader(str(ASSET))
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    text = "".join(tokens[i] for i in out).replace("Ġ", " ").replace("Ċ", "\n")
    assert text.startswith("        self.")
    compile("class Stack:\n    def __init__(self):\n" + text.rsplit("\n", 1)[0], "completion", "exec")
