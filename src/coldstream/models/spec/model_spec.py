"""ModelSpec: the numbers of a model, and its layers as records.

Knows nothing of files, weights, devices or what a layer computes; `models/read_spec.py` reads one.
"""

from dataclasses import dataclass, replace
from typing import Self

from coldstream.kvcache.cache import NgramShape
from coldstream.models.spec.layer_specs import (
    NO_DELTA_NET,
    NO_EXPERTS,
    AttentionSpec,
    DeltaNetSpec,
    HyperConnectionSpec,
    IndexerSpec,
    LayerKind,
    LayerSpec,
    MoeSpec,
    NgramSpec,
)


@dataclass(frozen=True)
class ModelSpec:
    """Names follow the Hugging Face configuration; sizes are in elements, 0 for parts that a model lacks.

    The blocks of the file are the layers of the trunk, 0 … num_layers − 1, then num_nextn_layers more. Those
    predict further tokens (MTP) and take no part in the forward pass. The attention of each layer may have
    other heads, another window and another rotary embedding. All layers with a gated DeltaNet are alike, and
    so are all with experts and all dense ones: their sizes are the model's.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    tied_output: bool  # the output matrix is the embedding table
    layers: tuple[LayerSpec, ...]  # of the trunk
    nextn_layers: tuple[LayerSpec, ...] = ()
    embedding_scale: float = 1.0  # of what enters the first block
    logit_softcap: float = 0.0  # logits become cap · tanh(logit / cap); 0: they stay
    num_absent_nextn_layers: int = 0  # MTP blocks that the file declares and holds no tensor of

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the file declares and the model does without, as text for people."""
        found = []
        if self.num_absent_nextn_layers:
            found.append(
                f"{self.architecture}.nextn_predict_layers is {self.num_absent_nextn_layers}, but the file "
                "holds no tensor of a block for multi-token prediction (MTP): the model runs without one"
            )
        if self._lacks_block_size:
            found.append(
                f"a text has at most {self.context_length} tokens: behind them {self.architecture} chooses "
                "the positions that it attends to by an indexer, which "
                f"{self.architecture}.attention.compress_ratios has to describe and the converter lost: "
                "convert the checkpoint again with a current one"
            )
        return tuple(found)

    @property
    def context_bound(self) -> str:
        """What bounds the context, to end a sentence about its tokens."""
        if self._lacks_block_size:
            return "this model attends to without its indexer"
        return "the model was trained for"

    @property
    def _lacks_block_size(self) -> bool:
        """Whether texts end where an indexer would begin to choose, because the file does not say how."""
        indexer = self.indexer
        if indexer is None or indexer.block_size:
            return False
        return self.context_length == indexer.dense_positions

    @property
    def is_indexed(self) -> bool:
        """Whether there are texts in which rows attend to some of the positions, which an indexer chooses."""
        return self.indexer is not None and self.context_length > self.indexer.dense_positions

    @property
    def index_dim(self) -> int:
        """Numbers that each layer with attention keeps of a position for its indexer; 0 without one."""
        return self.indexer.head_dim if self.indexer is not None and self.is_indexed else 0

    def for_context(self, length: int) -> Self:
        """The same for texts of at most `length` tokens, which may need no indexer."""
        return replace(self, context_length=min(length, self.context_length))

    @property
    def indexer(self) -> IndexerSpec | None:
        """Of the layers that attend; None if they see all positions."""
        return next((attention.indexer for attention in self.attentions), None)

    @property
    def hyper_connections(self) -> HyperConnectionSpec | None:
        """The residual streams of all blocks; None for one stream with norms."""
        return self.layers[0].hyper_connections

    @property
    def ngram_layer(self) -> int | None:
        """The layer before which n-grams enter the residual streams; None for a model without any."""
        return next((index for index, layer in enumerate(self.layers) if layer.ngram), None)

    @property
    def ngram(self) -> NgramSpec | None:
        return None if self.ngram_layer is None else self.layers[self.ngram_layer].ngram

    @property
    def ngram_shape(self) -> NgramShape | None:
        """Of what n-grams keep of a sequence."""
        layer, ngram, streams = self.ngram_layer, self.ngram, self.hyper_connections
        if layer is None or ngram is None or streams is None:
            return None
        return NgramShape(
            layer=layer,
            context=len(ngram.hashing.multipliers) - 1,
            history=(ngram.num_taps - 1) * ngram.dilation,
            width=streams.num_streams * self.hidden_size,
        )

    @property
    def drafts_by_mtp(self) -> bool:
        """Whether the file's block for multi-token prediction can draft."""
        return self.num_nextn_layers == 1

    @property
    def nextn_state_size(self) -> int:
        """Width of what a block for multi-token prediction reads of a row: of all residual streams."""
        streams = self.hyper_connections
        return self.hidden_size * (1 if streams is None else streams.num_streams)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_nextn_layers(self) -> int:
        return len(self.nextn_layers)

    @property
    def blocks(self) -> tuple[LayerSpec, ...]:
        """Layers of the trunk and MTP blocks together."""
        return self.layers + self.nextn_layers

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The mixers of the trunk [num_layers]."""
        return tuple(layer.kind for layer in self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Of the layers that attend, in order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        """Of each layer that attends: its heads of keys and values, and the size of a head."""
        return tuple((each.num_kv_heads, each.head_dim) for each in self.attentions)

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Of each layer that attends: the positions of which it needs keys and values; None: all.

        An indexer reads keys of its own of all positions, so that such layers need all.
        """
        return tuple(None if self.index_dim else each.window for each in self.attentions)

    @property
    def nextn(self) -> Self:
        """The MTP blocks as a model of their own, whose rows attend to all positions."""
        return replace(self, layers=tuple(map(_seeing_all, self.nextn_layers)), nextn_layers=())

    @property
    def delta_net(self) -> DeltaNetSpec:
        """The gated DeltaNet of all layers that have one."""
        mixers = (layer.mixer for layer in self.layers)
        return next((mixer for mixer in mixers if isinstance(mixer, DeltaNetSpec)), NO_DELTA_NET)

    @property
    def moe(self) -> MoeSpec:
        """The mixture of experts of all layers that have one."""
        ffns = (layer.ffn for layer in self.layers)
        return next((ffn for ffn in ffns if isinstance(ffn, MoeSpec)), NO_EXPERTS)

    @property
    def placed_layers(self) -> tuple[int, ...]:
        """The layers whose FFNs may lie outside fast memory: those with experts, or all of a dense model.

        Plans, traces, slots and statistics number these layers from 0; the others are always resident.
        """
        numbers = tuple(n for n, layer in enumerate(self.layers) if isinstance(layer.ffn, MoeSpec))
        return numbers or tuple(range(self.num_layers))

    def with_window(self, window: int | None) -> Self:
        """The same with attention to at most the last `window` positions, at least 1; None: as it is."""
        if window is None:
            return self
        trunk, nextn = (
            tuple(_with_window(layer, window) for layer in layers)
            for layers in (self.layers, self.nextn_layers)
        )
        return replace(self, layers=trunk, nextn_layers=nextn)

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def conv_kernel(self) -> int:
        return self.delta_net.conv_kernel

    @property
    def conv_dim(self) -> int:
        return self.delta_net.conv_dim

    @property
    def ssm_state_size(self) -> int:
        return self.delta_net.state_size

    @property
    def num_value_heads(self) -> int:
        return self.delta_net.num_value_heads

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts

    @property
    def num_experts_per_tok(self) -> int:
        return self.moe.num_experts_per_tok


def _with_window(layer: LayerSpec, window: int) -> LayerSpec:
    if not isinstance(layer.mixer, AttentionSpec):
        return layer
    narrower = window if layer.mixer.window is None else min(window, layer.mixer.window)
    return replace(layer, mixer=replace(layer.mixer, window=narrower))


def _seeing_all(layer: LayerSpec) -> LayerSpec:
    """Without the indexer: drafts change no token, and its cache would be one more."""
    if not isinstance(layer.mixer, AttentionSpec):
        return layer
    return replace(layer, mixer=replace(layer.mixer, indexer=None))
