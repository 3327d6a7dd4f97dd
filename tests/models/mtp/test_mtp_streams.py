"""A block for multi-token prediction beside several residual streams, as Qwen3.8-Flash-Next has it.

`transformers` has the layer and its mixtures, and not the block. Here its layer is run as the block, on what
enters it by the published definition: each stream is a product of the normed token and of its part of all
streams, normed as one row.
"""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from mtp_cases import Reference, make_variant
from one_sequence import open_cpu
from transformers import PreTrainedModel
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM

from builders import Dims, write_model
from coldstream.decoding.tree_builder import top_log_probs
from coldstream.engine import LLM
from coldstream.errors import ConfigError, UnsupportedError
from coldstream.models.cpu.mtp import CpuMtp
from coldstream.models.mtp.model import MAX_STEP_ROWS
from convert_hf import Variant, convert, stream_nextn
from hf_models import tiny_qwen4exp

IDS = [int(token) for token in np.random.default_rng(3).integers(0, 256, 40)]


class PublishedBlock:
    """All rows so far are computed again with each step."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = copy.deepcopy(model.config)
        config.num_hidden_layers, config.layer_types = 1, ["indexed_attention"]
        self._eps, self._num_streams = config.rms_norm_eps, config.hc_count
        self._embedding = model.model.embed_tokens
        self._block = Qwen4ExpForCausalLM(config).eval()
        self._nextn = {name: torch.from_numpy(value) for name, value in stream_nextn(config).items()}
        inner = self._block.model
        inner.layers[0].load_state_dict(model.model.layers[-1].state_dict())
        mixer = inner.hyper_connection_mixer
        with torch.no_grad():
            self._block.lm_head.weight.copy_(model.lm_head.weight)
            mixer.hc_norm.weight.copy_(self._nextn["hc_head_norm"] - 1)
            mixer.input_mix_weight_down.weight.copy_(self._nextn["hc_head_down"])
            mixer.input_mix_weight_up.weight.copy_(self._nextn["hc_head_up"])
        self._entering, self.streams = [], torch.empty(0)
        inner.layers[0].register_forward_pre_hook(
            lambda layer, given: (torch.cat(self._entering)[None], *given[1:])
        )
        mixer.register_forward_pre_hook(self._keep)
        self._token_ids: list[int] = []

    def _keep(self, mixer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        self.streams = given[0][0]

    @torch.no_grad()
    def feed(self, token_ids: list[int], streams: torch.Tensor) -> torch.Tensor:
        """Logits of rows [T], each a token after all streams of the row before it [T, C·E]."""
        embedded = _normed(self._embedding(torch.tensor(token_ids)), self._nextn["enorm"], self._eps)
        hidden = _normed(streams, self._nextn["hnorm"], self._eps).unflatten(-1, (self._num_streams, -1))
        pairs = torch.cat((embedded[:, None].expand_as(hidden), hidden), dim=-1)
        self._entering.append((pairs @ self._nextn["eh_proj"].T).flatten(1))
        self._token_ids += token_ids
        logits = self._block(torch.tensor([self._token_ids]), use_cache=False).logits[0]
        return logits[-len(token_ids) :]


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def trunk_streams(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    mixer = model.model.hyper_connection_mixer
    handle = mixer.register_forward_pre_hook(lambda module, given: kept.append(given[0][0]))
    with torch.no_grad():
        model(torch.tensor([token_ids]), use_cache=False)
    handle.remove()
    return kept[0]


@pytest.mark.sharded
def test_outputs_are_those_of_the_published_definition(tmp_path: Path) -> None:
    """Rows of a prompt, then three of a draft, each after the streams that the row before it left."""
    model = tiny_qwen4exp()
    path = convert(model, tmp_path / "model.gguf", Variant(mtp_block=True))
    ours, theirs = Reference(path, exact=False), PublishedBlock(model)
    streams = trunk_streams(model, IDS)
    hidden = ours.feed_trunk(IDS)
    assert np.abs(hidden - streams.numpy()).max() < 1e-4 * float(streams.std())
    tokens, before = IDS[1:], streams[:-1]
    for _ in range(4):
        expected, found = theirs.feed(tokens, before), ours.feed_block(tokens, before.numpy())
        assert expected.std() > 1
        assert np.abs(found.logits - expected.numpy()).max() < 1e-4
        assert np.abs(found.states - theirs.streams[-len(tokens) :].numpy()).max() < 1e-3
        tokens, before = [int(expected[-1].argmax())], theirs.streams[-1:]


@pytest.mark.sharded
def test_a_chain_goes_on_with_the_streams_of_the_block(tmp_path: Path) -> None:
    path = convert(tiny_qwen4exp(), tmp_path / "model.gguf", Variant(mtp_block=True))
    reference = Reference(path, exact=True, kv_type="i16")
    hidden = reference.feed_trunk(IDS)
    expected, found = [], reference.feed_block(IDS[1:], hidden[:-1])
    for _ in range(4):
        (tokens,), _ = top_log_probs(found.logits[-1:], 4)
        expected.append(tokens.tolist())
        found = reference.feed_block(expected[-1][:1], found.states[-1:])
    with open_cpu(path, threads=2, context_length=64) as runner:
        sequence = runner.load_mtp().new_sequence()
        sequence.append(IDS[1:], list(hidden[:-1]))
        assert [ids for ids, _ in sequence.chain(4)] == expected


def test_columns_that_cannot_be_halved_are_refused_by_the_name_of_their_matrix(tmp_path: Path) -> None:
    model = make_variant(
        "streams", quant="F32", types={"*.nextn.eh_proj.weight": "Q4_K"}, dims=Dims(hidden=128)
    )
    (path,) = write_model(tmp_path / "m.gguf", model)
    with (
        open_cpu(path, threads=1, context_length=64) as runner,
        pytest.raises(UnsupportedError, match=r"blk\.4\.nextn\.eh_proj\.weight, whose blocks of Q4_K lie"),
    ):
        runner.load_mtp()


@pytest.mark.parametrize("name", ["moe", "streams"])
def test_a_file_with_two_blocks_does_not_draft_by_them(tmp_path: Path, name: str) -> None:
    """It is refused in one sentence, where drafts are planned and where the block would be loaded."""
    model = make_variant(name)
    for tensor, values in list(model.tensors.items()):
        if tensor.startswith("blk.4."):
            again = tensor.replace("blk.4.", "blk.5.")
            model.tensors[again], model.types[again] = values, model.types.get(tensor, "F32")
    model.metadata |= {f"{model.arch}.block_count": 6, f"{model.arch}.nextn_predict_layers": 2}
    for key, value in model.metadata.items():
        if isinstance(value, list) and len(value) == 5:
            model.metadata[key] = [*value, value[-1]]
    (path,) = write_model(tmp_path / "two.gguf", model)
    with pytest.raises(ConfigError, match="the file has 2 blocks for multi-token prediction, and drafting"):
        LLM(str(path), device="cpu", spec_type="mtp")
    with (
        open_cpu(path, threads=1, context_length=64) as runner,
        pytest.raises(UnsupportedError, match=r"two\.gguf has 2 blocks for multi-token prediction, and"),
    ):
        runner.load_mtp()


def test_a_run_of_a_block_has_zeros_for_all_of_its_rows() -> None:
    assert CpuMtp.chunk_size <= MAX_STEP_ROWS
