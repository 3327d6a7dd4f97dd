"""The Qwen3.5 / Qwen3.6 text models: architectures `qwen35moe` and dense `qwen35`.

A block is x + mixer(norm(x)), then + FFN(norm): the mixer is a gated DeltaNet in most blocks and full
attention in the others, the FFN a mixture of experts or dense. Written once over `Ops`; the forward pass
calls nothing else and does no arithmetic of its own, so that an implementation of `Ops` may record it and
play it back.

MTP blocks, which predict further tokens, lie behind the trunk in the file and are not loaded here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from coldstream.errors import InvalidRequestError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.ops import (
    Array,
    DeltaNetWeights,
    ExpertOutputs,
    ExpertWeights,
    Ops,
    RopeSpec,
    Rows,
    Weight,
)
from coldstream.kvcache.cache import AttentionState, LayerState, ModelCache
from coldstream.layers.attention import AttentionWeights, attention
from coldstream.layers.dense_ffn import DenseFfnWeights, dense_ffn
from coldstream.layers.gated_delta_net import GatedDeltaNetWeights, gated_delta_net
from coldstream.layers.moe import MoeWeights, moe
from coldstream.models.sanity import check_small_tensors
from coldstream.models.spec import ModelSpec


@dataclass(frozen=True)
class Block:
    """One layer of the trunk."""

    attn_norm: Array  # [E]
    mixer: AttentionWeights | GatedDeltaNetWeights
    post_attention_norm: Array  # [E]; before the FFN, not after the mixer
    ffn: MoeWeights | DenseFfnWeights


@dataclass(frozen=True)
class Qwen35Model:
    """The weights of a model, and the operations they were loaded for."""

    spec: ModelSpec
    ops: Ops
    token_embd: Weight  # [vocab, E]
    blocks: tuple[Block, ...]
    output_norm: Array  # [E]
    output: Weight  # [vocab, E]; token_embd itself if the file has no other
    warnings: tuple[str, ...]  # what looks wrong with the file and may be right

    @classmethod
    def load(cls, file: GGUFFile, spec: ModelSpec, ops: Ops) -> Self:
        """All weights of the trunk by their names in the file, which `spec` has been checked against.

        Raises ModelChangedError if the file is not what it was when it was opened, and InconsistentError if
        the values of its small tensors contradict the conventions of the format.
        """
        loader = Loader(file, spec, ops)
        token_embd = loader.weight("token_embd") if spec.tied_output else loader.mapped("token_embd")
        blocks = tuple(loader.block(index) for index in range(spec.num_layers))
        output_norm = loader.vector("output_norm.weight")
        return cls(
            spec=spec,
            ops=ops,
            token_embd=token_embd,
            blocks=blocks,
            output_norm=output_norm,
            output=token_embd if spec.tied_output else loader.weight("output"),
            warnings=check_small_tensors(spec, loader.vectors),
        )

    def forward(self, token_ids: Array, rows: Rows, cache: ModelCache) -> Array:
        """Hidden states after the last norm, [T, E], of int32 token_ids [T] at `rows`.

        Advances the states of the slots in `cache` that `rows` names. InvalidRequestError if there are no
        rows.
        """
        if token_ids.shape[0] == 0:
            raise InvalidRequestError("there are no tokens to compute: a forward pass needs at least one")
        ops, eps = self.ops, self.spec.rms_norm_eps
        angles = ops.rope_angles(rows.positions, RopeSpec(self.spec.rope_dims, self.spec.rope_theta))
        x = ops.embed(self.token_embd, token_ids)
        norms = [block.attn_norm for block in self.blocks] + [self.output_norm]
        normed = ops.rms_norm(x, norms[0], eps)
        for block, state, next_norm in zip(self.blocks, cache.layers, norms[1:], strict=True):
            x, normed = ops.add_norm(
                x, self.mix(block, normed, angles, state, rows), block.post_attention_norm, eps
            )
            x, normed = ops.add_norm(x, self.feed_forward(block, normed), next_norm, eps)
        return normed

    def logits(self, hidden: Array) -> Array:
        """What `forward` returned, or some of its rows: [T, E] → [T, vocab]."""
        return self.ops.linear(hidden, (self.output,))[0]

    def mix(self, block: Block, x: Array, angles: Array, state: LayerState, rows: Rows) -> Array:
        """The mixer of a block on normed x [T, E]; advances `state`."""
        if isinstance(block.mixer, AttentionWeights):
            assert isinstance(state, AttentionState)
            return attention(self.ops, x, block.mixer, angles, state.k, state.v, rows)
        assert not isinstance(state, AttentionState)
        return gated_delta_net(self.ops, x, block.mixer, state.conv_state, state.state, rows)

    def feed_forward(self, block: Block, x: Array) -> Array | ExpertOutputs:
        """The FFN of a block on normed x [T, E]: what `Ops.add_norm` adds to the residual stream."""
        if isinstance(block.ffn, MoeWeights):
            return moe(self.ops, x, block.ffn)
        return dense_ffn(self.ops, x, block.ffn)


@dataclass(frozen=True)
class Loader:
    """Finds weights by name, in whichever of their forms the file has them, and remembers the small ones."""

    file: GGUFFile
    spec: ModelSpec
    ops: Ops
    vectors: dict[str, np.ndarray] = field(default_factory=dict)

    def weight(self, name: str) -> Weight:
        """The matrix or stack `name`.weight."""
        return self.ops.load_weight(self.file, self.file.tensors[f"{name}.weight"])

    def mapped(self, name: str) -> Weight:
        """The same, for weights of which a token reads a part."""
        return self.ops.map_weight(self.file, self.file.tensors[f"{name}.weight"])

    def vector(self, name: str) -> Array:
        """The small tensor `name`, suffix included."""
        self.vectors[name] = self.ops.read_values(self.file, self.file.tensors[name])
        return self.ops.float_array(self.vectors[name])

    def parts(
        self, load: Callable[[str], Weight], names: tuple[str, ...], fused: str, sizes: tuple[int, ...]
    ) -> tuple[Weight, ...]:
        """The weights `names`, or their `sizes` rows each of the one weight that has them all."""
        if f"{fused}.weight" in self.file.tensors:
            return self.ops.split_rows(load(fused), sizes)
        return tuple(load(name) for name in names)

    def block(self, index: int) -> Block:
        prefix = f"blk.{index}."
        is_attention = self.spec.layer_kinds[index] == "attention"
        return Block(
            attn_norm=self.vector(f"{prefix}attn_norm.weight"),
            mixer=self.attention(prefix) if is_attention else self.gated_delta_net(prefix),
            post_attention_norm=self.vector(f"{prefix}post_attention_norm.weight"),
            ffn=self.moe(prefix) if self.spec.is_moe else self.dense_ffn(prefix),
        )

    def attention(self, prefix: str) -> AttentionWeights:
        attn_q, attn_k, attn_v = self.parts(
            self.weight,
            (f"{prefix}attn_q", f"{prefix}attn_k", f"{prefix}attn_v"),
            fused=f"{prefix}attn_qkv",
            sizes=(2 * self.spec.query_dim, self.spec.kv_dim, self.spec.kv_dim),
        )
        return AttentionWeights(
            attn_q=attn_q,
            attn_k=attn_k,
            attn_v=attn_v,
            attn_output=self.weight(f"{prefix}attn_output"),
            attn_q_norm=self.vector(f"{prefix}attn_q_norm.weight"),
            attn_k_norm=self.vector(f"{prefix}attn_k_norm.weight"),
            eps=self.spec.rms_norm_eps,
        )

    def gated_delta_net(self, prefix: str) -> GatedDeltaNetWeights:
        bias = f"{prefix}ssm_dt.bias"
        rule = DeltaNetWeights(
            conv_taps=self.vector(f"{prefix}ssm_conv1d.weight"),
            a=self.vector(f"{prefix}ssm_a"),
            dt_bias=self.vector(bias if bias in self.file.tensors else f"{prefix}ssm_dt"),
            norm=self.vector(f"{prefix}ssm_norm.weight"),
            key_head_ids=self.ops.int_vector(self.spec.key_head_ids),
            num_key_heads=self.spec.num_key_heads,
            eps=self.spec.rms_norm_eps,
        )
        return GatedDeltaNetWeights(
            attn_qkv=self.weight(f"{prefix}attn_qkv"),
            attn_gate=self.weight(f"{prefix}attn_gate"),
            ssm_alpha=self.weight(f"{prefix}ssm_alpha"),
            ssm_beta=self.weight(f"{prefix}ssm_beta"),
            ssm_out=self.weight(f"{prefix}ssm_out"),
            rule=rule,
        )

    def dense_ffn(self, prefix: str) -> DenseFfnWeights:
        return DenseFfnWeights(
            ffn_gate=self.weight(f"{prefix}ffn_gate"),
            ffn_up=self.weight(f"{prefix}ffn_up"),
            ffn_down=self.weight(f"{prefix}ffn_down"),
        )

    def moe(self, prefix: str) -> MoeWeights:
        ffn_gate_exps, ffn_up_exps = self.parts(
            self.mapped,
            (f"{prefix}ffn_gate_exps", f"{prefix}ffn_up_exps"),
            fused=f"{prefix}ffn_gate_up_exps",
            sizes=(self.spec.expert_ffn_size, self.spec.expert_ffn_size),
        )
        # Some files store the one row of this matrix as a vector.
        shared_gate = self.file.tensors[f"{prefix}ffn_gate_inp_shexp.weight"]
        shared_gate = replace(shared_gate, shape=(1, self.spec.hidden_size))
        return MoeWeights(
            ffn_gate_inp=self.ops.load_float_weight(
                self.file, self.file.tensors[f"{prefix}ffn_gate_inp.weight"]
            ),
            ffn_gate_inp_shexp=self.ops.load_weight(self.file, shared_gate),
            experts=ExpertWeights(
                gate=ffn_gate_exps,
                up=ffn_up_exps,
                down=self.mapped(f"{prefix}ffn_down_exps"),
                shared_gate=self.weight(f"{prefix}ffn_gate_shexp"),
                shared_up=self.weight(f"{prefix}ffn_up_shexp"),
                shared_down=self.weight(f"{prefix}ffn_down_shexp"),
            ),
            num_experts_per_tok=self.spec.num_experts_per_tok,
        )
