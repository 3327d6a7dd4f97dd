"""ModelSizes: the bytes and counts of a model for placement. Knows nothing of files or tensors."""

from dataclasses import dataclass
from typing import Final

from coldstream.gguf.quant_types import QuantType
from coldstream.placement.routing_trace import RoutedModel

# Neighbouring tokens choose similar experts: n tokens as many different ones as n to this power would that
# choose by themselves. Where no trace says it: of a full-size model's text, `streaming_shared.json`.
NOVELTY: Final = 0.65
# Of the ring through which a prompt's experts are copied, in groups.
MIN_BUFFERS = 3  # one is read, one is written, and one waits
BUFFER_BYTES = 32 * 2**20
# Share of a layer's experts that a ring has places for, so that the GPU itself shares out those of short
# prompts. The bus reads half of the experts that they want; the CPU takes the others.
SHARE_WITH_PLACES = 0.3
SLOT_ALIGNMENT = 256  # of each matrix in a slot, as of any tensor in a GPU's memory


@dataclass(frozen=True)
class Products:
    """Weights of one type that activations are multiplied with."""

    quant_type: QuantType
    num_values: int
    num_bytes: int


@dataclass(frozen=True)
class WindowedLayers:
    """The layers whose attention sees a window of so many positions."""

    window: int
    width: int  # of their query heads, a part of the model's `attention_width`
    cache_share: float  # of the model's `kv_token_bytes`


@dataclass(frozen=True)
class ModelSizes:
    """Plain numbers of one model. An expert is its gate, up and down matrices together.

    Layers are those with something to place, see `ModelSpec.placed_layers`; they are numbered from 0.
    """

    fingerprint: str  # of the file, `GGUFFile.fingerprint`
    num_experts: int  # of a layer; 0: a dense model without anything to place
    num_experts_per_tok: int
    expert_bytes: tuple[int, ...]  # of one expert, by layer
    dense_bytes: int  # of all other weights that the forward pass needs, embedding included
    dense_token_bytes: int  # of those, what one token reads
    kv_token_bytes: int  # keys and values of one token in all layers that attend, in the cache's type
    state_bytes: int  # recurrent states of one sequence
    token_parameters: int  # weights that one token is multiplied with
    expert_parameters: int  # weights of one expert
    attention_width: int  # elements of all query heads of all layers that attend
    windows: tuple[WindowedLayers, ...] = ()
    is_dense: bool = False  # whether each layer's one expert is the FFN of a dense model
    # By type; empty: not known, and then bytes alone count.
    dense_products: tuple[Products, ...] = ()  # of a token, outside experts
    expert_products: tuple[tuple[Products, ...], ...] = ()  # of one expert, by layer
    head: Products | None = None  # of those outside experts, what only the last row of a prompt meets
    table_bytes: int = 0  # of `dense_bytes`, an embedding that is not the head too
    placed_layers: tuple[int, ...] = ()  # the model's numbers of the layers; empty: 0, 1, …
    novelty: float = NOVELTY
    hidden_size: int = 0  # values of a row between layers; 0: not known, and then only weights are moved

    @property
    def num_layers(self) -> int:
        return len(self.expert_bytes)

    def products_of_expert(self, layer: int) -> tuple[Products, ...]:
        """Of one expert of a layer, by type; empty: not known."""
        return self.expert_products[layer] if self.expert_products else ()

    def cached_bytes(self, context: float) -> float:
        """Bytes of keys and values that a token reads behind `context` others."""
        hidden = sum(max(0, context - each.window) * each.cache_share for each in self.windows)
        return (context - hidden) * self.kv_token_bytes

    def attention_elements(self, start: int, count: int) -> float:
        """Elements of queries of `count` rows behind `start` positions, times the positions that they see."""

        def pairs(distance: int) -> float:
            """Of a row and a position that is so far behind it or further."""
            first, last = (max(0, end - distance) for end in (start, start + count))
            return (last**2 - first**2) / 2

        hidden = sum(pairs(each.window) * each.width for each in self.windows)
        return pairs(0) * self.attention_width - hidden

    @property
    def row_bytes(self) -> int:
        """Of a row between layers, as float32."""
        return 4 * self.hidden_size

    @property
    def all_expert_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return self.num_experts * sum(self.expert_bytes)

    @property
    def routed(self) -> RoutedModel:
        """The record that traces and plans of this model must match."""
        return RoutedModel(self.fingerprint, self.num_layers, self.num_experts, self.num_experts_per_tok)


def slot_bytes(matrix_bytes: int) -> int:
    """Bytes of an expert's matrix in a slot: rounded up to SLOT_ALIGNMENT."""
    return -(-matrix_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
