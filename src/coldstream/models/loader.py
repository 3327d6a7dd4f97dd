"""The weights of a model, found in a file by the names and layouts of its architecture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from coldstream.errors import UnsupportedError
from coldstream.gguf.messages import shorten
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.indexer.records import IndexerHeads
from coldstream.kernels.ops import (
    Array,
    AttentionHeads,
    ChoiceRule,
    DeltaNetWeights,
    ExpertBiases,
    ExpertWeights,
    FfnWeights,
    Ops,
    PostNorms,
    RopeScaling,
    RopeSpec,
    RouterWeights,
    Weight,
)
from coldstream.layers.attention import AttentionWeights, IndexerWeights
from coldstream.layers.gated_delta_net import GatedDeltaNetWeights
from coldstream.layers.hyper_connections import HyperConnectionWeights
from coldstream.layers.moe import MoeWeights, ParallelFfn
from coldstream.layers.ngram import NgramMixture, NgramWeights
from coldstream.layers.residual import Norm
from coldstream.models.architectures import ARCHITECTURES, Architecture, GatheredRows
from coldstream.models.footprint import FFN_MATRICES
from coldstream.models.spec.layer_specs import (
    AttentionSpec,
    DeltaNetSpec,
    DenseFfnSpec,
    LayerSpec,
    MoeSpec,
    NgramSpec,
)
from coldstream.models.spec.layer_tensors import NGRAM_TABLE, OUTPUT_SCALE, ROPE_FACTORS
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.models.spec.sanity import check_rope_factors


@dataclass(frozen=True)
class Block:
    """One layer."""

    attn_norm: Norm  # before the mixer, with the n-grams that enter before it
    mixer: AttentionWeights | GatedDeltaNetWeights
    ffn_norm: Norm  # before the FFN, whatever the file calls it
    ffn: MoeWeights | FfnWeights
    attn_post: PostNorms | None = None  # of what the mixer gives
    ffn_post: PostNorms | None = None  # of what the FFN gives


@dataclass(frozen=True)
class NextnBlock:
    """A block for multi-token prediction; None: the model's own is used."""

    # [E, 2·E], columns of the normed embedding, then of the normed hidden state. With several residual
    # streams both halves, [E, E] each.
    eh_proj: Weight | tuple[Weight, Weight]
    enorm: Array  # [E]
    hnorm: Array  # [E], of C residual streams [C·E]
    block: Block
    token_embd: Weight | None  # [vocab, E]
    output_norm: Norm | None
    output: Weight | None  # [vocab, E]


@dataclass(frozen=True)
class Loader:
    """Loads weights by name, in any of the layouts that files have, and keeps the small ones."""

    file: GGUFFile
    spec: ModelSpec
    ops: Ops
    vectors: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.spec.architecture]

    def weight(self, name: str) -> Weight:
        """The matrix `name`.weight."""
        return self.ops.load_weight(self.file, self.file.tensors[f"{name}.weight"])

    def block_weight(self, prefix: str, name: str, gathered: Mapping[str, GatheredRows]) -> Weight:
        """The matrix `name` of the block `prefix`: a tensor of its own, or `gathered` rows of another."""
        if f"{prefix}{name}.weight" in self.file.tensors:
            return self.weight(f"{prefix}{name}")
        rows = gathered[name]
        return self.ops.load_rows(self.file, self.file.tensors[f"{prefix}{rows.source}.weight"], rows.row_ids)

    def halves(self, name: str) -> tuple[Weight, Weight]:
        """The left and the right half of the columns of a matrix. UnsupportedError if a block has of both."""
        info = self.file.tensors[f"{name}.weight"]
        rows, cols = info.shape
        if cols // 2 % info.quant_type.block_elements:
            problem = f"whose blocks of {info.quant_type.name} lie across its halves: choose another file"
            raise UnsupportedError(f"{shorten(self.file.paths[0])} has {info.name}, {problem}")
        # Each row is two rows of half the columns.
        halved = replace(info, shape=(2 * rows, cols // 2))
        left, right = (self.ops.load_rows(self.file, halved, range(half, 2 * rows, 2)) for half in (0, 1))
        return left, right

    def mapped(self, name: str) -> Weight:
        """The matrix `name`.weight, mapped: for weights of which a token reads only a part."""
        return self.ops.map_weight(self.file, self.file.tensors[f"{name}.weight"])

    def vector(self, name: str) -> Array:
        """The small tensor `name`, suffix included."""
        self.vectors[name] = self.ops.read_values(self.file, self.file.tensors[name])
        return self.ops.float_array(self.vectors[name])

    def named(self, name: str) -> str:
        """A tensor with its file, which is another one for the block of a sidecar."""
        return f"{shorten(self.file.paths[self.file.tensors[name].shard])}: {name}"

    def parts(
        self, load: Callable[[str], Weight], names: tuple[str, ...], fused: str, sizes: tuple[int, ...]
    ) -> tuple[Weight, ...]:
        """The weights `names`, or, of `sizes` rows each, the parts of the one weight that holds them all."""
        if f"{fused}.weight" in self.file.tensors:
            return self.ops.split_rows(load(fused), sizes)
        return tuple(load(name) for name in names)

    def norm(self, name: str, part: str) -> Norm:
        """The norm `name` [E] of one residual stream, or the mixture `part` of several."""
        streams = self.spec.hyper_connections
        if streams is None:
            return self.vector(f"{name}.weight")
        inject = f"{part}_inject"
        return HyperConnectionWeights(
            norm=self.vector(f"{part}_norm.weight"),
            down=self.weight(f"{part}_down"),
            up=self.weight(f"{part}_up"),
            inject=self.weight(inject) if f"{inject}.weight" in self.file.tensors else None,
            num_streams=streams.num_streams,
        )

    def entry(self, prefix: str, ngram: NgramSpec | None) -> Norm:
        """The norm before a mixer, with what enters the residual streams before it."""
        norm = self.norm(f"{prefix}attn_norm", f"{prefix}hc_attn")
        if ngram is None:
            return norm
        assert isinstance(norm, HyperConnectionWeights), "n-grams enter several streams"
        return NgramMixture(self.ngram(prefix, ngram), norm)

    def block(self, index: int) -> Block:
        """The weights of a layer, of the trunk or, from `spec.num_layers` on, of an MTP block."""
        prefix, layer = f"blk.{index}.", (self.spec.layers + self.spec.nextn.layers)[index]
        return Block(
            attn_norm=self.entry(prefix, layer.ngram),
            mixer=self.attention(prefix, layer.mixer)
            if isinstance(layer.mixer, AttentionSpec)
            else self.gated_delta_net(prefix, layer.mixer, self.architecture.gathered(layer)),
            ffn_norm=self.norm(f"{prefix}{self.architecture.ffn_norm}", f"{prefix}hc_ffn"),
            ffn=self.moe(prefix, layer.ffn)
            if isinstance(layer.ffn, MoeSpec)
            else self.dense_ffn(prefix, layer.ffn),
            attn_post=self.post_norm(prefix, "post_attention_norm") if layer.post_norms else None,
            ffn_post=self.ffn_post_norms(prefix, layer) if layer.post_norms else None,
        )

    def post_norm(self, prefix: str, name: str) -> PostNorms:
        """The norm of what a part of a block gives."""
        return PostNorms(self.vector(f"{prefix}{name}.weight"))

    def ffn_post_norms(self, prefix: str, layer: LayerSpec) -> PostNorms:
        """Those of what the FFN gives, and the number of the layer."""
        post = self.post_norm(prefix, "post_ffw_norm")
        if isinstance(layer.ffn, MoeSpec) and layer.ffn.shared == "parallel":
            of_dense, of_experts = (self.vector(f"{prefix}post_ffw_norm_{n}.weight") for n in (1, 2))
            post = replace(post, routed=of_experts, shared=of_dense)
        if not layer.output_scale:
            return post
        return replace(post, scale=self.vector(f"{prefix}{OUTPUT_SCALE}"))

    def rope(self, spec: AttentionSpec) -> RopeSpec:
        """The rotary embedding of a layer, with the factors that the file may have for it."""
        if not spec.rope_factors:
            return spec.rope
        if ROPE_FACTORS not in self.vectors:
            self.vector(ROPE_FACTORS)
        factors = check_rope_factors(self.vectors[ROPE_FACTORS])
        return replace(spec.rope, scaling=RopeScaling(factors, 1.0))

    def nextn(self, index: int) -> NextnBlock:
        """The MTP block `index`, at least `spec.num_layers`."""
        prefix = f"blk.{index}.nextn."
        embedding, norm, head = (
            prefix + name if f"{prefix}{name}.weight" in self.file.tensors else None
            for name in ("embed_tokens", "shared_head_norm", "shared_head_head")
        )
        has_streams = self.spec.hyper_connections is not None
        own_norm = norm is not None or has_streams
        return NextnBlock(
            eh_proj=self.halves(f"{prefix}eh_proj") if has_streams else self.weight(f"{prefix}eh_proj"),
            enorm=self.vector(f"{prefix}enorm.weight"),
            hnorm=self.vector(f"{prefix}hnorm.weight"),
            block=self.block(index),
            token_embd=self.mapped(embedding) if embedding else None,
            output_norm=self.norm(f"{prefix}shared_head_norm", f"{prefix}hc_head") if own_norm else None,
            output=self.weight(head) if head else None,
        )

    def attention(self, prefix: str, spec: AttentionSpec) -> AttentionWeights:
        sizes = {"attn_q": spec.query_rows, "attn_k": spec.kv_dim, "attn_v": spec.kv_dim}
        if spec.values_are_keys:
            del sizes["attn_v"]
        attn_q, attn_k, *attn_v = self.parts(
            self.weight,
            tuple(f"{prefix}{name}" for name in sizes),
            fused=f"{prefix}attn_qkv",
            sizes=tuple(sizes.values()),
        )
        has_norms = spec.qk_norm == "head"
        q_bias, k_bias, v_bias = (
            None if spec.bias == "none" else self.vector(f"{prefix}attn_{name}.bias") for name in "qkv"
        )
        return AttentionWeights(
            attn_q=attn_q,
            attn_k=attn_k,
            attn_v=None if spec.values_are_keys else attn_v[0],
            attn_output=self.weight(f"{prefix}attn_output"),
            output_bias=self.vector(f"{prefix}attn_output.bias") if spec.bias == "all" else None,
            attn_gate=self.weight(f"{prefix}attn_gate") if spec.gate_rows else None,
            heads=AttentionHeads(
                q_norm=self.vector(f"{prefix}attn_q_norm.weight") if has_norms else None,
                k_norm=self.vector(f"{prefix}attn_k_norm.weight") if has_norms else None,
                eps=self.spec.rms_norm_eps,
                output_gate=spec.output_gate,
                window=spec.window,
                scale=spec.scale,
                v_norm=spec.v_norm,
                q_bias=q_bias,
                k_bias=k_bias,
                v_bias=v_bias,
                sinks=self.vector(f"{prefix}attn_sinks.weight") if spec.sinks else None,
            ),
            rope=self.rope(spec),
            indexer=self.indexer(prefix, spec) if spec.indexer is not None and self.spec.is_indexed else None,
        )

    def indexer(self, prefix: str, spec: AttentionSpec) -> IndexerWeights:
        indexer, name = spec.indexer, f"{prefix}indexer."
        assert indexer is not None, "the layer has one"
        heads = IndexerHeads(
            q_norm=self.vector(f"{name}q_norm.weight"),
            k_norm=self.vector(f"{name}k_norm.weight"),
            eps=self.spec.rms_norm_eps,
            top_k=indexer.top_k,
            block_size=indexer.block_size,
        )
        return IndexerWeights(
            q_proj=self.weight(f"{name}q_proj"),
            k_proj=self.weight(f"{name}k_proj"),
            heads=heads,
            block_rope=replace(self.rope(spec), block_size=indexer.block_size),
        )

    def gated_delta_net(
        self, prefix: str, spec: DeltaNetSpec, gathered: Mapping[str, GatheredRows]
    ) -> GatedDeltaNetWeights:
        bias = f"{prefix}ssm_dt.bias"
        rule = DeltaNetWeights(
            conv_taps=self.vector(f"{prefix}ssm_conv1d.weight"),
            a=self.vector(f"{prefix}ssm_a"),
            dt_bias=self.vector(bias if bias in self.file.tensors else f"{prefix}ssm_dt"),
            norm=self.vector(f"{prefix}ssm_norm.weight"),
            key_head_ids=self.ops.int_vector(spec.key_head_ids),
            num_key_heads=spec.num_key_heads,
            eps=self.spec.rms_norm_eps,
            output_gate=spec.output_gate,
        )
        return GatedDeltaNetWeights(
            attn_qkv=self.block_weight(prefix, "attn_qkv", gathered),
            attn_gate=self.block_weight(prefix, "attn_gate", gathered),
            ssm_alpha=self.block_weight(prefix, "ssm_alpha", gathered),
            ssm_beta=self.block_weight(prefix, "ssm_beta", gathered),
            ssm_out=self.weight(f"{prefix}ssm_out"),
            rule=rule,
        )

    def ngram(self, prefix: str, spec: NgramSpec) -> NgramWeights:
        return NgramWeights(
            table=self.ops.map_ngram_table(self.file, self.file.tensors[NGRAM_TABLE], spec.hashing),
            hashing=spec.hashing,
            key=self.weight(f"{prefix}ple_key"),
            value=self.weight(f"{prefix}ple_value"),
            norm_key=self.vector(f"{prefix}ple_norm_key.weight"),
            norm_query=self.vector(f"{prefix}ple_norm_query.weight"),
            norm_conv=self.vector(f"{prefix}ple_norm_conv.weight"),
            taps=self.vector(f"{prefix}ple_conv1d.weight"),
            dilation=spec.dilation,
        )

    def dense_ffn(self, prefix: str, spec: DenseFfnSpec) -> FfnWeights:
        infos = [self.file.tensors[f"{prefix}{name}.weight"] for name in FFN_MATRICES]
        gate, up, down = (self.ops.load_ffn_weight(self.file, info) for info in infos)
        return FfnWeights(gate, up, down, spec.activation)

    def expert_biases(self, prefix: str) -> ExpertBiases:
        """Biases of the routed experts, which stay in memory wherever the experts are."""
        infos = (self.file.tensors[f"{prefix}{name}_exps.bias"] for name in FFN_MATRICES)
        values = [self.ops.read_values(self.file, info) for info in infos]
        gate, up, down = map(self.ops.float_array, values)
        return ExpertBiases(gate, up, down, on_host=(values[0], values[1]))

    def moe(self, prefix: str, spec: MoeSpec) -> MoeWeights:
        ffn_gate_exps, ffn_up_exps = self.parts(
            self.mapped,
            (f"{prefix}ffn_gate_exps", f"{prefix}ffn_up_exps"),
            fused=f"{prefix}ffn_gate_up_exps",
            sizes=(spec.ffn_size, spec.ffn_size),
        )
        experts = ExpertWeights(
            ffn_gate_exps,
            ffn_up_exps,
            self.mapped(f"{prefix}ffn_down_exps"),
            activation=spec.activation,
            biases=self.expert_biases(prefix) if spec.bias else None,
        )
        parallel = None
        if spec.shared == "parallel":
            parallel = self.parallel_ffn(prefix, spec)
        elif spec.shared != "none":
            experts = replace(
                experts,
                shared_gate=self.weight(f"{prefix}ffn_gate_shexp"),
                shared_up=self.weight(f"{prefix}ffn_up_shexp"),
                shared_down=self.weight(f"{prefix}ffn_down_shexp"),
            )
        return MoeWeights(self.router(prefix, spec), experts, parallel)

    def parallel_ffn(self, prefix: str, spec: MoeSpec) -> ParallelFfn:
        """The dense network beside the experts, which stays in memory wherever the experts are."""
        gate, up, down = (self.weight(f"{prefix}{name}") for name in FFN_MATRICES)
        network = FfnWeights(gate, up, down, spec.activation)
        return ParallelFfn(self.vector(f"{prefix}ffn_norm.weight"), self.spec.rms_norm_eps, network)

    def router(self, prefix: str, spec: MoeSpec) -> RouterWeights:
        shared_gate = None
        if spec.shared == "gated":
            # Some files store the one row of this matrix as a vector.
            gate = self.file.tensors[f"{prefix}ffn_gate_inp_shexp.weight"]
            gate = replace(gate, shape=(1, self.spec.hidden_size))
            shared_gate = self.ops.load_weight(self.file, gate)
        router, name = spec.router, f"{prefix}ffn_gate_inp"
        ones = np.ones(self.spec.hidden_size, np.float32)
        return RouterWeights(
            gate=self.ops.load_float_weight(
                self.file,
                self.file.tensors[f"{name}.weight"],
                self._input_scales(name) if router.own_input else None,
            ),
            shared_gate=shared_gate,
            num_experts_per_tok=spec.num_experts_per_tok,
            input_norm=self.ops.float_array(ones) if router.own_input else None,
            eps=self.spec.rms_norm_eps,
            rule=ChoiceRule(
                router,
                bias=self.vector(f"{name}.bias") if router.bias else None,
                selection_bias=self.vector(f"{prefix}exp_probs_b.bias") if router.selection_bias else None,
                expert_scale=self.vector(f"{prefix}ffn_down_exps.scale") if router.expert_scale else None,
            ),
        )

    def _input_scales(self, name: str) -> np.ndarray:
        """What a router's own input is multiplied by, behind its norm: its weight takes them over.

        So the router of a later layer, which has others, reads the same input.
        """
        scale = self.ops.read_values(self.file, self.file.tensors[f"{name}.scale"])
        self.vectors[f"{name}.scale"] = scale
        return scale * np.float32(self.spec.hidden_size**-0.5)
