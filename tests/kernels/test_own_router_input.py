"""Routers that read a norm of the residual stream, and not what experts read: on each device, and alike."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from router_cases import rule_of
from same_bits import assert_same_bits
from test_host_ops import HIDDEN, OwnExecutor, activations, assert_same, host_ops
from test_host_router import CPU, Outputs

from builders import SMALL, make_model, write_model
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels import _csrc
from coldstream.kernels.arithmetic.reference import dot_lanes, empty_activations
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.cuda_ops import MAX_NORMED_ROWS
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.experts.partition import Partition, sharing_of
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.split import NUM_WORDS
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import ChoiceRule, ExpertWeights, RouterSpec, RouterWeights
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kernels.rms_norm.reference import rms_norm_exact
from coldstream.kernels.router.cuda import Ahead, NormBefore, RouterBuffers, router_gemv_cuda
from coldstream.kernels.router.reference import choose_experts_exact
from coldstream.models.loader import Loader
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.layer_specs import MoeSpec
from specs import with_layers

EPS, EXPERTS, RANKS = 1e-6, 20, 4
GEMMA = RouterSpec(own_input=True, expert_scale=True)
NOTHING = ExpertWeights(None, None, None)


def gemma_rule() -> ChoiceRule:
    return rule_of(GEMMA, EXPERTS, torch.Generator().manual_seed(4))


def router_of(gate: Any, rule: ChoiceRule) -> RouterWeights:
    return RouterWeights(gate, None, RANKS, rule, torch.ones(HIDDEN), EPS)


def matrix() -> torch.Tensor:
    return torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(3)) * HIDDEN**-0.5


def choice_by_hand(total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    read = rms_norm_exact(total, torch.ones(HIDDEN), EPS)
    return choose_experts_exact(dot_lanes(read, matrix()), RANKS, gemma_rule())


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("tokens", [1, MAX_NORMED_ROWS, MAX_NORMED_ROWS + 1, 9])
@pytest.mark.parametrize("is_own", [False, True], ids=["ours", "own"])
def test_a_gpu_reads_the_residual_stream(tokens: int, is_own: bool) -> None:
    """In the launch that norms it, and behind one; experts get the norm that is theirs."""
    ops = host_ops()
    ops.step_positions = torch.arange(tokens, dtype=torch.int32)
    if is_own:
        ops.executor = OwnExecutor(MoeKernels(ops))
    gate = QuantTensor.from_bytes(matrix().flatten().view(torch.uint8), QuantType.F32, (EXPERTS, HIDDEN))
    x, update, weight = activations(1, tokens, HIDDEN), activations(2, tokens, HIDDEN), torch.rand(HIDDEN)
    total, normed = ops.add_norm(x, update, weight, EPS, for_router=True)
    routing = ops.router(normed, router_of(gate, gemma_rule()), NOTHING, total)
    assert_same(total, x + update)
    assert_same(normed.values, rms_norm_exact(x + update, weight, EPS))
    for found, expected in zip((routing.ids, routing.weights), choice_by_hand(x + update), strict=True):
        assert_same(found, expected)


def test_a_cpu_reads_the_residual_stream() -> None:
    x, total = activations(1, 5, HIDDEN), activations(2, 5, HIDDEN)
    rule = gemma_rule()
    routings = []
    for ops, gate, as_array in (
        (ReferenceOps(exact=True), matrix(), torch.as_tensor),
        (
            CpuOps(2),
            _csrc.Weight.from_array(
                matrix().flatten().view(torch.uint8), int(QuantType.F32), EXPERTS, HIDDEN
            ),
            lambda tensor: tensor.numpy(),
        ),
    ):
        own = replace(rule, expert_scale=as_array(rule.expert_scale))
        weights = replace(router_of(gate, own), input_norm=as_array(torch.ones(HIDDEN)))
        routings.append(ops.router(as_array(x), weights, NOTHING, as_array(total)))
    for routing in routings:
        for found, expected in zip((routing.ids, routing.weights), choice_by_hand(total), strict=True):
            assert_same_bits(torch.as_tensor(found), expected)


@pytest.mark.usefixtures("host")
def test_a_later_layers_router_reads_the_same_input() -> None:
    tokens = 2
    x, update, weight = activations(1, tokens, HIDDEN), activations(2, tokens, HIDDEN), torch.rand(HIDDEN)
    later = matrix().flip(0)
    codes, normed, total = empty_activations(tokens, HIDDEN, CPU), torch.empty_like(x), torch.empty_like(x)
    norm = NormBefore(x, update, total, weight, EPS, codes, is_unweighted=True)
    outs, guesses = (Outputs(tokens, RANKS, EXPERTS) for _ in range(2))
    rules = gemma_rule(), rule_of(GEMMA, EXPERTS, torch.Generator().manual_seed(5))
    ahead = Ahead(later, guesses.ids.tensor, guesses.logits.tensor, guesses.weights.tensor, rule=rules[1])
    buffers = RouterBuffers(*outs.tensors[:2], None, outs.tensors[3], torch.zeros(1, dtype=torch.int32))
    router_gemv_cuda(normed, matrix(), None, buffers, None, ahead, norm, rules[0])
    read = rms_norm_exact(x + update, torch.ones(HIDDEN), EPS)
    assert_same_bits(normed, rms_norm_exact(x + update, weight, EPS))
    for found, gate, rule in zip((outs, guesses), (matrix(), later), rules, strict=True):
        ids, weights = choose_experts_exact(dot_lanes(read, gate), RANKS, rule)
        assert_same_bits(found.ids.checked(), ids)
        assert_same_bits(found.weights.checked(), weights)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("tokens", [1, 2])
def test_the_cpu_gets_what_experts_read(tokens: int) -> None:
    """By the router's launch, or the one behind it."""
    ops = host_ops()
    x, own = ops.activations(tokens, HIDDEN), activations(2, tokens, HIDDEN)
    torch.as_tensor(x.values.numpy())[:] = activations(1, tokens, HIDDEN)
    gate = QuantTensor.from_bytes(matrix().flatten().view(torch.uint8), QuantType.F32, (EXPERTS, HIDDEN))
    stacks = [ExpertTable(torch.zeros(EXPERTS).long(), QuantType.F32, 1, 4, True) for _ in range(MATRICES)]
    box = Mailbox.planned(RANKS, HIDDEN, tokens)
    places = Partition(torch.zeros(MATRICES, EXPERTS).long(), torch.zeros(tokens, RANKS).int(), None)
    times = torch.zeros(NUM_WORDS, dtype=torch.int32)
    sharing = sharing_of(stacks, times, box, 0, places, torch.zeros(tokens, RANKS).int())
    MoeKernels(ops).route(replace(x, for_router=own), router_of(gate, gemma_rule()), sharing)
    assert box.request.numpy()[0] == 1 | tokens << 16
    assert_same_bits(torch.from_numpy(box.x.numpy())[:tokens], activations(1, tokens, HIDDEN))


def test_a_router_with_an_input_of_its_own_is_whole() -> None:
    rule = ChoiceRule(GEMMA)
    for arguments in (
        (None, None, 2, rule),
        (None, None, 2, ChoiceRule(), torch.ones(4)),
        (None, torch.ones(1, 4), 2, rule, torch.ones(4)),
    ):
        with pytest.raises(ValueError, match="an input of its own"):
            RouterWeights(*arguments)


@pytest.mark.parametrize("quant_type", ["F32", "F16"])
def test_a_loaded_router_is_that_of_transformers(tmp_path: Any, quant_type: str) -> None:
    """The weight takes over the factors of the input, so that all layers read the same norm."""
    # Here, as only this test needs it: it is not there where kernels of another machine are tested.
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter

    hidden, experts = SMALL.hidden, SMALL.experts
    config = Gemma4TextConfig(hidden_size=hidden, num_experts=experts, top_k_experts=2, rms_norm_eps=1e-6)
    theirs = Gemma4TextRouter(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        theirs.proj.weight.copy_(torch.randn(experts, hidden, generator=generator).half().float())
        theirs.scale.copy_(0.5 + torch.rand(hidden, generator=generator))
        theirs.per_expert_scale.copy_(0.5 + torch.rand(experts, generator=generator))
    model = make_model("qwen3moe", dims=SMALL, quant="F32", tokenizer=False)
    with GGUFFile.open(write_model(tmp_path / "plain.gguf", model)[0]) as file:
        spec = with_layers(read_spec(file.metadata, file.tensors), MoeSpec, router=GEMMA)
    model.tensors |= {
        "blk.0.ffn_gate_inp.weight": theirs.proj.weight.detach().numpy(),
        "blk.0.ffn_gate_inp.scale": theirs.scale.detach().numpy(),
        "blk.0.ffn_down_exps.scale": theirs.per_expert_scale.detach().numpy(),
    }
    model.types["blk.0.ffn_gate_inp.weight"] = quant_type
    residual = 3 * torch.randn(30, hidden, generator=generator)
    _, expected, expected_ids = theirs(residual)
    with GGUFFile.open(write_model(tmp_path / "model.gguf", model)[0]) as file:
        moe = spec.layers[0].ffn
        assert isinstance(moe, MoeSpec)
        for ops, as_array in ((ReferenceOps(), torch.as_tensor), (CpuOps(1), lambda tensor: tensor.numpy())):
            weights = Loader(file, spec, ops).router("blk.0.", replace(moe, num_experts_per_tok=2))
            routing = ops.router(as_array(residual), weights, NOTHING, as_array(residual))
            assert np.array_equal(routing.ids, expected_ids)
            np.testing.assert_allclose(routing.weights, expected.detach(), rtol=1e-5)
