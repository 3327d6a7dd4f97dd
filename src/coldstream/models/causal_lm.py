"""The forward pass of every model, driven by the specs of its layers.

A block is x + mixer(norm(x)), then + FFN(norm). The mixer is full attention or a gated DeltaNet. The FFN is a
mixture of experts, or dense. Some families have several residual streams, and mixtures of them in place of
norms. The forward pass is written once over `Ops`: it calls nothing else and does no arithmetic of its own.
So an implementation of `Ops` may record it and replay it.

MTP blocks, which predict further tokens, lie behind the trunk in the file and are not loaded here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from coldstream.errors import InvalidRequestError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.linear.records import BiasedOutput
from coldstream.kernels.ops import (
    Array,
    AttentionInputs,
    Caches,
    CommittedPath,
    DeltaNetInputs,
    ExpertOutputs,
    Ops,
    RecurrentLayer,
    RopeSpec,
    Rows,
    Weight,
)
from coldstream.kvcache.batch import path_in_windows, rows_in_windows
from coldstream.kvcache.cache import AttentionState, DeltaNetState, LayerState, ModelCache, is_windowed
from coldstream.layers.attention import AttentionWeights, attention, project_attention
from coldstream.layers.gated_delta_net import (
    GatedDeltaNetWeights,
    gated_delta_net,
    project_gated_delta_net,
)
from coldstream.layers.moe import MoeWeights, moe
from coldstream.layers.ngram import NgramInputs, NgramMixture, find_ngrams
from coldstream.layers.residual import Entering, Norm, enter, update, values_of
from coldstream.models.loader import Block, Loader
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.models.spec.sanity import check_small_tensors

OnLayer = Callable[[int, Array], None]
Angles = Mapping[RopeSpec, Array]


def ignore_layer(layer: int, x: Array) -> None:
    """For callers that need no residual streams."""


@dataclass(frozen=True)
class CausalLM:
    """The weights of a model, and the operations they were loaded for."""

    spec: ModelSpec
    ops: Ops
    token_embd: Weight  # [vocab, E]
    blocks: tuple[Block, ...]
    output_norm: Norm
    output: Weight  # [vocab, E]; token_embd itself if the file has no other
    warnings: tuple[str, ...]  # suspicious values of small tensors, as text

    @classmethod
    def load(cls, file: GGUFFile, spec: ModelSpec, ops: Ops) -> Self:
        """Loads all weights of the trunk by their names in the file, against which `spec` was checked.

        Raises ModelChangedError if the file has changed since it was opened, and InconsistentError if values
        of its small tensors contradict the conventions of the format.
        """
        loader = Loader(file, spec, ops)
        token_embd = loader.weight("token_embd") if spec.tied_output else loader.mapped("token_embd")
        blocks = tuple(loader.block(index) for index in range(spec.num_layers))
        output_norm = loader.norm("output_norm", "output_hc")
        return cls(
            spec=spec,
            ops=ops,
            token_embd=token_embd,
            blocks=blocks,
            output_norm=output_norm,
            output=token_embd if spec.tied_output else loader.weight("output"),
            warnings=check_small_tensors(spec, loader.vectors, loader.named),
        )

    def forward(
        self, token_ids: Array, rows: Rows, cache: ModelCache, on_layer: OnLayer = ignore_layer
    ) -> Array:
        """Hidden states after the last norm, [T, E], of int32 token_ids [T] at `rows`.

        on_layer is called with each layer and the residual stream after it, [T, E], or all streams side by
        side. Their memory is used again once nothing refers to it. Advances the states in `cache` that `rows`
        names. InvalidRequestError without rows.
        """
        if token_ids.shape[0] == 0:
            raise InvalidRequestError("there are no tokens to compute: a forward pass needs at least one")
        ngrams = self.ngrams(token_ids, rows, cache)  # first, as they may come from a disk
        # No variable holds the embedding here: it would keep its memory from being used again.
        return self.through_blocks(self.embed(token_ids), self.angles(rows), rows, cache, on_layer, ngrams)

    def embed(self, token_ids: Array) -> Array:
        """What enters the first block, [T, E], of int32 token_ids [T]."""
        embedded, scale = self.ops.embed(self.token_embd, token_ids), self.spec.embedding_scale
        return embedded if scale == 1 else self.ops.scale(embedded, scale)

    def ngrams(self, token_ids: Array, rows: Rows, cache: ModelCache) -> NgramInputs | None:
        """Those of the one layer that has some; None without any."""
        for block, state in zip(self.blocks, cache.layers, strict=True):
            if isinstance(block.attn_norm, NgramMixture):
                assert isinstance(state, DeltaNetState)
                assert state.ngram is not None, "a cache of the model has it"
                return find_ngrams(self.ops, token_ids, block.attn_norm.ngram, state.ngram, rows)
        return None

    def angles(self, rows: Rows) -> Angles:
        """`Ops.rope_angles` of the rows, for each rotary embedding that a layer has."""
        mixers = [block.mixer for block in self.blocks if isinstance(block.mixer, AttentionWeights)]
        ropes = dict.fromkeys(mixer.rope for mixer in mixers)
        ropes |= dict.fromkeys(mixer.indexer.block_rope for mixer in mixers if mixer.indexer is not None)
        return {rope: self.ops.rope_angles(rows.positions, rope) for rope in ropes}

    def through_blocks(
        self,
        x: Entering,
        angles: Angles,
        rows: Rows,
        cache: ModelCache,
        on_layer: OnLayer = ignore_layer,
        ngrams: NgramInputs | None = None,
    ) -> Array:
        """Hidden states after the last norm, [T, E], of what enters the first block.

        on_layer: see `forward`. ngrams: those of the rows. Advances the states in `cache` that `rows` names.
        """
        ops, eps = self.ops, self.spec.rms_norm_eps
        norms = [block.attn_norm for block in self.blocks] + [self.output_norm]
        residual, normed = enter(ops, x, norms[0], eps)
        del x  # or its memory would not be used again
        of_windows = rows_in_windows(rows) if cache.has_windows else rows
        for layer, (block, state, next_norm) in enumerate(
            zip(self.blocks, cache.layers, norms[1:], strict=True)
        ):
            inputs = self.project(block, normed, angles, state, rows)
            del normed
            mixed = self.mix(block, inputs, state, of_windows if is_windowed(state) else rows)
            routes = isinstance(block.ffn, MoeWeights)
            del inputs
            residual, normed = update(
                ops, residual, mixed, block.ffn_norm, eps, post=block.attn_post, for_router=routes
            )
            del mixed
            output = self.feed_forward(block, normed, values_of(residual))
            residual, normed = update(
                ops, residual, output, next_norm, eps, post=block.ffn_post, ngrams=ngrams
            )
            del output
            on_layer(layer, values_of(residual))
        return normed

    def commit(self, path: CommittedPath, cache: ModelCache) -> None:
        """Advances keys, values and recurrent states as a chain of the path's rows would have done."""
        caches: list[tuple[Array, ...]] = []
        of_windows: list[tuple[Array, ...]] = []
        recurrent: list[RecurrentLayer] = []
        for block, state in zip(self.blocks, cache.layers, strict=True):
            if isinstance(state, AttentionState):
                (of_windows if state.is_windowed else caches).append(state.arrays)
                continue
            assert isinstance(block.mixer, GatedDeltaNetWeights)
            assert state.kept is not None, "a cache for draft trees keeps their inputs"
            if state.ngram is not None:
                self.ops.commit_ngram(state.ngram, path)
            recurrent.append(RecurrentLayer(block.mixer.rule, state.conv_state, state.state, state.kept))
        if caches:
            self.ops.commit_attention(caches, path)
        if of_windows:
            self.ops.commit_attention(of_windows, path_in_windows(path))
        if recurrent:
            self.ops.commit_delta_net(recurrent, path)

    def logits(self, hidden: Array) -> Array:
        """Logits of hidden states that `forward` returned, or of some rows: [T, E] → [T, vocab]."""
        (logits,) = self.ops.linear(hidden, (self.output,))
        cap = self.spec.logit_softcap
        return self.ops.softcap(logits, cap) if cap else logits

    def project(
        self, block: Block, x: Array, angles: Angles, state: LayerState, rows: Rows
    ) -> AttentionInputs | DeltaNetInputs:
        """What the mixer of a block reads of normed x [T, E]."""
        mixer = block.mixer
        if isinstance(mixer, AttentionWeights):
            of_rows = angles[mixer.rope]
            of_blocks = None if mixer.indexer is None else angles[mixer.indexer.block_rope]
            return project_attention(self.ops, x, mixer, of_rows, of_blocks)
        assert not isinstance(state, AttentionState)
        return project_gated_delta_net(self.ops, x, mixer, rows.keeping(state.kept))

    def mix(
        self, block: Block, inputs: AttentionInputs | DeltaNetInputs, state: LayerState, rows: Rows
    ) -> Array | BiasedOutput:
        """The mixer of a block on what `project` returned for `rows`: [T, E]. Advances `state`."""
        if isinstance(inputs, AttentionInputs):
            assert isinstance(block.mixer, AttentionWeights)
            assert isinstance(state, AttentionState)
            caches = Caches(state.k, state.v, state.index)
            return attention(self.ops, inputs, block.mixer, caches, rows)
        assert isinstance(block.mixer, GatedDeltaNetWeights)
        assert not isinstance(state, AttentionState)
        return gated_delta_net(self.ops, inputs, block.mixer, state.conv_state, state.state)

    def feed_forward(self, block: Block, x: Array, residual: Array) -> Array | ExpertOutputs:
        """The FFN of a block on x [T, E], a norm of `residual`, to which `Ops.add_norm` adds the result."""
        if isinstance(block.ffn, MoeWeights):
            return moe(self.ops, x, block.ffn, residual)
        return self.ops.ffn(x, block.ffn)
