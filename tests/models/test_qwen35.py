"""The reference model against `transformers` and llama.cpp, and against itself in every way of feeding it."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from coldstream.errors import InvalidRequestError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.ops import Rows
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kvcache.cache import ModelCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.read_spec import read_spec
from convert_hf import Variant, convert
from gguf import GGMLQuantizationType as Type
from hf_models import VOCAB_SIZE, hf_logits, tiny_model
from tools import llama_cpp

ModelMaker = Callable[[bool, int], PreTrainedModel]
FileMaker = Callable[..., Path]
EVERY_SHAPE = pytest.mark.parametrize(
    ("moe", "ratio"),
    [(True, 2), (True, 3), (False, 2), (False, 3)],
    ids=["moe, ratio 2", "moe, ratio 3", "dense, ratio 2", "dense, ratio 3"],
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small cost more to share out than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def hf_model() -> ModelMaker:
    """(is MoE, value heads per key head) → a model of `transformers`."""
    return functools.cache(lambda moe, ratio: tiny_model(moe=moe, value_heads_per_key_head=ratio))


@pytest.fixture(scope="session")
def gguf_path(hf_model: ModelMaker, tmp_path_factory: pytest.TempPathFactory) -> FileMaker:
    """(is MoE, value heads per key head, how the file is written) → the same model as a file."""
    folder = tmp_path_factory.mktemp("models")
    plain = functools.cache(lambda moe, ratio: convert(hf_model(moe, ratio), folder / f"{moe}-{ratio}.gguf"))

    def make(moe: bool, ratio: int, variant: Variant | None = None) -> Path:
        if variant is None:
            return plain(moe, ratio)
        return convert(hf_model(moe, ratio), folder / "variant.gguf", variant)

    return make


@pytest.fixture(scope="session")
def token_ids() -> list[int]:
    """More than one chunk of the DeltaNet, and no special tokens."""
    return np.random.default_rng(0).integers(0, VOCAB_SIZE - 2, 70).tolist()


def load(path: Path, *, exact: bool = False) -> CausalLM:
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        return CausalLM.load(file, spec, ReferenceOps(exact=exact))


def make_rows(*sequences: tuple[int, int, int]) -> Rows:
    """Rows of (state_id, first position, count) sequences."""
    positions = [p for _, start, count in sequences for p in range(start, start + count)]
    state_ids = [state_id for state_id, _, count in sequences for _ in range(count)]
    return Rows(torch.tensor(positions, dtype=torch.int32), torch.tensor(state_ids, dtype=torch.int32))


def cache_for(model: CausalLM, state_ids: int = 1) -> ModelCache:
    return ModelCache(model.spec, model.ops, state_ids, context_length=128, kv_type="f32")


@torch.no_grad()
def feed(model: CausalLM, cache: ModelCache, token_ids: list[int], rows: Rows) -> torch.Tensor:
    return model.logits(model.forward(torch.tensor(token_ids, dtype=torch.int32), rows, cache))


def logits(model: CausalLM, token_ids: list[int]) -> torch.Tensor:
    return feed(model, cache_for(model), token_ids, make_rows((0, 0, len(token_ids))))


@pytest.mark.sharded
@EVERY_SHAPE
def test_logits_equal_transformers(moe, ratio, hf_model, gguf_path, token_ids) -> None:
    expected = hf_logits(hf_model(moe, ratio), token_ids)
    assert expected.std() > 1
    # Both are in float32, and a last bit of each product moves a logit by up to 1e-4.
    assert (logits(load(gguf_path(moe, ratio)), token_ids) - expected).abs().max() < 5e-4


@pytest.mark.sharded(of="models on the CPU")
@EVERY_SHAPE
def test_logits_equal_llama_cpp(moe, ratio, gguf_path, token_ids) -> None:
    path = gguf_path(moe, ratio)
    expected = torch.from_numpy(llama_cpp.logits(path, token_ids))
    assert (logits(load(path), token_ids) - expected).abs().max() < 1e-3


@pytest.mark.sharded(of="models on the CPU")
def test_gradients_equal_transformers(hf_model, gguf_path, token_ids) -> None:
    """The reference can be trained: the gradient of a loss reaches the embedding as in `transformers`."""
    ids = token_ids[:40]
    model, hf = load(gguf_path(True, 2)), hf_model(True, 2)
    model.token_embd.requires_grad_()
    hidden = model.forward(torch.tensor(ids, dtype=torch.int32), make_rows((0, 0, 40)), cache_for(model))
    torch.nn.functional.cross_entropy(model.logits(hidden)[:-1], torch.tensor(ids[1:])).backward()
    hf.zero_grad()
    torch.nn.functional.cross_entropy(
        hf(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:])
    ).backward()
    expected = hf.model.embed_tokens.weight.grad
    assert (model.token_embd.grad - expected).norm() < 1e-4 * expected.norm()


VARIANTS = {
    "fused": Variant(fused_experts=True, fused_qkv=True),
    "mtp block, shared gate as matrix": Variant(mtp_block=True, shared_gate_as_matrix=True),
    "ollama": Variant(ollama=True),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_variants_of_a_file_are_the_same_model(variant, gguf_path, token_ids) -> None:
    expected = logits(load(gguf_path(True, 2)), token_ids)
    actual = logits(load(gguf_path(True, 2, variant)), token_ids)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_tied_output(tmp_path, token_ids) -> None:
    hf = tiny_model(moe=False, value_heads_per_key_head=2, tied=True)
    path = convert(hf, tmp_path / "tied.gguf")
    model = load(path)
    assert model.output is model.token_embd
    # Tied embeddings are of size 1, which makes logits about 16 times larger than the other models'.
    expected = hf_logits(hf, token_ids)
    assert (logits(model, token_ids) - expected).abs().max() < 1e-4 * expected.std()


SMALL_TYPES = [Type.BF16, Type.Q8_0, Type.Q4_K]


@pytest.mark.parametrize("small_type", SMALL_TYPES, ids=lambda t: t.name)
def test_small_tensors_may_have_any_type(small_type, gguf_path, token_ids) -> None:
    stems = ("ssm_alpha", "ssm_beta", "ffn_gate_inp", "ffn_gate_inp_shexp")
    variant = Variant(dict.fromkeys(stems, small_type), shared_gate_as_matrix=True)
    expected = logits(load(gguf_path(True, 2)), token_ids)
    actual = logits(load(gguf_path(True, 2, variant)), token_ids)
    # Rounded weights move a logit a little, and a flipped expert choice more; another layout moves all by
    # 1.4.
    assert (actual - expected).abs().mean() < 0.5
    assert not torch.equal(actual, expected)


INTEGER_TYPES = {
    "": Type.Q8_0,
    "token_embd": Type.Q5_K,
    "output": Type.Q6_K,
    "ffn_gate": Type.Q4_K,
    "ffn_up": Type.Q4_K,
    "ffn_down": Type.Q6_K,
    "ffn_gate_exps": Type.Q4_K,
    "ffn_up_exps": Type.Q5_K,
    "ffn_down_exps": Type.Q6_K,
}
OTHER_TYPES = {
    "": Type.Q4_K,
    "output": Type.F16,
    "ffn_gate": Type.IQ3_S,
    "ffn_up": Type.IQ4_NL,
    "attn_q": Type.Q3_K,
}


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize(
    ("moe", "types"),
    [(False, INTEGER_TYPES), (False, OTHER_TYPES), (True, INTEGER_TYPES)],
    ids=["dense, integer types", "dense, other types", "moe, integer types"],
)
def test_rounding_of_quantised_products_is_about_that_of_llama_cpp(moe, types, gguf_path, token_ids) -> None:
    """Both round activations to 8 bits, around the same dequantised model: alike for K-types.

    For types with blocks of 32 llama.cpp has a scale for every 32 activations and rounds less. In a random
    MoE model roundings flip some expert choices, which moves logits more than the rounding itself.
    """
    path = gguf_path(moe, 2, Variant(types))
    ids = token_ids[:6]
    unrounded = logits(load(path), ids)
    theirs = (torch.from_numpy(llama_cpp.logits(path, ids)) - unrounded).abs().mean()
    ours = (logits(load(path, exact=True), ids) - unrounded).abs().mean()
    if moe:
        assert max(ours, theirs) < 0.5 * unrounded.std()
    else:
        assert theirs < 0.1 * unrounded.std()
        assert ours < 1.25 * theirs


@pytest.mark.sharded(of="models on the CPU")
def test_cpu_logits_are_the_exact_reference_bit_for_bit(gguf_path, token_ids) -> None:
    """The whole model in C++ and in PyTorch, both by docs/arithmetic.md."""
    path, count = gguf_path(True, 2, Variant(INTEGER_TYPES)), 6
    ops = CpuOps(2)
    with GGUFFile.open(path) as file:
        model = CausalLM.load(file, read_spec(file.metadata, file.tensors), ops)
        cache = ModelCache(model.spec, ops, num_states=1, context_length=count)
        rows = Rows(ops.int_vector(range(count)), ops.int_vector([0] * count))
        actual = model.logits(model.forward(ops.int_vector(token_ids[:count]), rows, cache))
    reference = load(path, exact=True)
    cache = ModelCache(reference.spec, reference.ops, num_states=1, context_length=count)
    expected = feed(reference, cache, token_ids[:count], make_rows((0, 0, count)))
    np.testing.assert_array_equal(actual, expected.numpy())


def test_chunks_and_neighbours_change_nothing(gguf_path, token_ids) -> None:
    """Two sequences in chunks and steps of one, side by side in a batch, against each alone and at once."""
    model = load(gguf_path(True, 3))
    first, second = token_ids[:40], token_ids[40:]
    cache = cache_for(model, state_ids=3)
    outputs = {2: [], 0: []}
    for (a, b), (c, d) in [((0, 7), (0, 1)), ((7, 8), (1, 23)), ((8, 40), (23, 24)), ((40, 40), (24, 30))]:
        rows = make_rows((2, a, b - a), (0, c, d - c))
        result = feed(model, cache, first[a:b] + second[c:d], rows)
        outputs[2].append(result[: b - a])
        outputs[0].append(result[b - a :])
    for state_id, ids in ((2, first), (0, second)):
        torch.testing.assert_close(torch.cat(outputs[state_id]), logits(model, ids), atol=1e-3, rtol=0)


def test_a_state_starts_afresh_after_reset(gguf_path, token_ids) -> None:
    model = load(gguf_path(False, 2))
    cache = cache_for(model, state_ids=2)
    for state_id in (0, 1):
        feed(model, cache, token_ids[:20], make_rows((state_id, 0, 20)))
    cache.reset(1)
    again = feed(model, cache, token_ids[:9], make_rows((1, 0, 9)))
    torch.testing.assert_close(again, logits(model, token_ids[:9]))
    stale = feed(model, cache, token_ids[:9], make_rows((0, 0, 9)))
    assert (stale - again).abs().max() > 0.1


def test_trap_48_a_forward_pass_needs_a_token(gguf_path) -> None:
    model = load(gguf_path(False, 2))
    with pytest.raises(InvalidRequestError, match="at least one"):
        feed(model, cache_for(model), [], make_rows())


@pytest.mark.parametrize("token_id", [-1, 320, 2**31 - 1])
def test_token_ids_out_of_range(token_id, gguf_path) -> None:
    model = load(gguf_path(False, 2))
    with pytest.raises(ValueError, match="token ids must lie in 0 … 319"):
        feed(model, cache_for(model), [token_id], make_rows((0, 0, 1)))


def test_a_nan_in_a_weight_reaches_the_logits(gguf_path, token_ids) -> None:
    """Nothing on the way may turn a broken model into plausible numbers."""
    model = load(gguf_path(True, 2))
    model.blocks[1].ffn.experts.shared_down[3, 5] = math.nan
    assert logits(model, token_ids[:3]).isnan().all()


def test_likely_wrong_conventions_are_reported_at_load(tmp_path) -> None:
    path = tmp_path / "model.gguf"
    hf = tiny_model(moe=False, value_heads_per_key_head=2)
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.input_layernorm.weight += 1
    assert "added 1 twice" in load(convert(hf, path)).warnings[0]


class OutsideOps(TorchDispatchMode):
    """Fails on any tensor computation that is not made within a call of the wrapped operations."""

    def __init__(self, ops: ReferenceOps) -> None:
        super().__init__()
        self.ops, self.depth, self.calls = ops, 0, 0

    def __getattr__(self, name: str):
        function = getattr(self.ops, name)

        def call(*args, **kwargs):
            self.depth, self.calls = self.depth + 1, self.calls + 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert self.depth > 0, f"{func} outside of the operations"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("moe", [True, False], ids=["moe", "dense"])
def test_the_model_computes_only_through_ops(moe, gguf_path) -> None:
    """So what an implementation of Ops records is complete."""
    model = load(gguf_path(moe, 2))
    watched = OutsideOps(model.ops)
    token_ids = torch.tensor([1, 2], dtype=torch.int32)
    rows, cache = make_rows((0, 0, 2)), cache_for(model)
    with torch.no_grad(), watched:
        watching = replace(model, ops=watched)
        watching.logits(watching.forward(token_ids, rows, cache))
    assert watched.calls == 3 + 4 * 5 + 4 * (2 if moe else 1) + 1


@pytest.mark.sharded(of="models on the CPU")
def test_llama_cpp_oracle_is_consistent(gguf_path, token_ids) -> None:
    """Greedy steps are the argmax of logits, and text survives its tokens."""
    path = gguf_path(True, 2)
    prompt = token_ids[:10]
    generated = llama_cpp.greedy(path, prompt, 5)
    rows = llama_cpp.logits(path, prompt + generated)
    assert rows.shape == (15, 320)
    assert rows[9:14].argmax(-1).tolist() == generated
    with llama_cpp.open_session(path, 64) as session:
        ids = session.vocabulary.encode("the rest, 12\n<|im_end|>é", parse_special=True)
        assert b"".join(session.vocabulary.piece(i) for i in ids) == "the rest, 12\n<|im_end|>é".encode()
        assert 319 in ids
        assert 319 not in session.vocabulary.encode("<|im_end|>")
    with pytest.raises(RuntimeError, match="cannot load"):
        llama_cpp.logits("/nonexistent.gguf", [1])


def test_llama_cpp_layout_check(monkeypatch) -> None:
    monkeypatch.setitem(llama_cpp.CONTEXT_FIELDS, "n_ctx", llama_cpp.Field(4, "<I", 512))
    with pytest.raises(RuntimeError, match="n_ctx is 2048, not 512"):
        llama_cpp.library().context_params()
