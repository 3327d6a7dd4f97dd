"""Reads the hyper-parameters of the `qwen35` architectures and decides what the converters left ambiguous.

Unit of work: one key, with the range that it must lie in. Refuses what would otherwise be computed wrongly
without a sign: other kinds of file, scaled rotary embeddings, other router functions.
"""

from collections.abc import Container
from typing import Final

from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.gguf.messages import shorten
from coldstream.gguf.metadata import Metadata

ARCHITECTURES: Final = ("qwen35", "qwen35moe")
MAX_BLOCKS: Final = 1024
MAX_NEXTN_LAYERS: Final = 8
MAX_HEADS: Final = 1024

_SOFTMAX_GATING: Final = 1
# Keys that only Ollama's converters write.
_OLLAMA_KEYS: Final = ("mrope_sections", "rope.mrope_section", "rope.mrope_interleaved", "vision.block_count")


class Hyperparameters:
    """The keys of one model: `integer("block_count", …)` reads `qwen35moe.block_count`.

    `num_blocks` counts all blocks of the file, `num_layers` those of the trunk; the others are MTP blocks.
    Raises UnsupportedError for a file that is not a whole model of a known architecture.
    """

    def __init__(self, keys: Metadata, tensor_names: Container[str]) -> None:
        self.keys = keys
        self.architecture = _architecture(keys)
        self.num_blocks = self.integer("block_count", 1, MAX_BLOCKS)
        num_nextn_layers = self._num_nextn_layers(tensor_names)
        self.num_layers = self.num_blocks - num_nextn_layers
        trunk = (f"blk.{layer}.attn_norm.weight" for layer in range(self.num_layers))
        if num_nextn_layers and not any(name in tensor_names for name in trunk):
            what = "holds only the MTP (draft) block of a model: open the model file that it was cut from"
            raise UnsupportedError(f"{shorten(keys.path)} {what}")
        self._refuse_variants()

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.keys

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        return self.keys.integer(self.key(name), low, high, default)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        return self.keys.number(self.key(name), low, high, default)

    def inconsistent(self, name: str, problem: str) -> InconsistentError:
        """An error about a key whose value contradicts another statement of the file."""
        return self.keys.error(InconsistentError, self.key(name), problem)

    def per_layer(self, name: str, high: int) -> tuple[int, ...]:
        """A number of every layer [num_layers], each 0 … `high`; most files give one number for all."""
        values = self.keys.integers(self.key(name), 0, high)
        if len(values) == 1:
            return values * self.num_layers
        if len(values) not in (self.num_layers, self.num_blocks):
            raise self.inconsistent(name, f"{len(values)} values for {self.num_layers} layers")
        return values[: self.num_layers]

    def uniform(self, name: str, high: int) -> int:
        """The one number 1 … `high` of all layers that have it; 0 says that a layer has not."""
        values = {value for value in self.per_layer(name, high) if value}
        if not values:
            raise self.inconsistent(name, f"0, expected 1 to {high}")
        if len(values) > 1:
            problem = f"differs between layers ({sorted(values)}), which is not supported"
            raise self.keys.error(UnsupportedError, self.key(name), problem)
        return values.pop()

    def declared_recurrent(self) -> tuple[str, tuple[bool, ...]] | None:
        """What the metadata says of each layer, and in which key: True for a DeltaNet, False for attention.

        None if it says nothing, as some of Ollama's files.
        """
        name = "attention.recurrent_layers"
        if name in self:
            flags = self.keys.flags(self.key(name))
            if len(flags) not in (self.num_layers, self.num_blocks):
                raise self.inconsistent(name, f"{len(flags)} values for {self.num_layers} layers")
            return name, flags[: self.num_layers]
        name = "full_attention_interval"
        if name in self:
            interval = self.integer(name, 1, MAX_BLOCKS)
            return name, tuple((layer + 1) % interval != 0 for layer in range(self.num_layers))
        name = "attention.head_count_kv"
        counts = self.per_layer(name, MAX_HEADS)
        return (name, tuple(count == 0 for count in counts)) if 0 in counts else None

    def value_heads_grouped(self) -> bool:
        """Whether the value heads of the DeltaNet are in the order of the original checkpoint.

        Ollama's converters record that they have reordered them; their files without the record have not
        been, while all other converters reorder and record nothing.
        """
        name = "ssm.v_head_reordered"
        if name in self:
            return not self.keys.flag(self.key(name))
        return any(key in self for key in _OLLAMA_KEYS)

    def _num_nextn_layers(self, tensor_names: Container[str]) -> int:
        """MTP blocks: as declared, or as found where a converter kept the tensors and dropped the key."""
        declared = self.integer("nextn_predict_layers", 0, MAX_NEXTN_LAYERS, 0)
        found = 0
        while f"blk.{self.num_blocks - 1 - found}.nextn.eh_proj.weight" in tensor_names:
            found += 1
        num_nextn_layers = max(declared, found)
        if num_nextn_layers >= self.num_blocks:
            problem = f"{self.num_blocks}, all of them MTP blocks: the file holds no layer to run"
            raise self.inconsistent("block_count", problem)
        return num_nextn_layers

    def _refuse_variants(self) -> None:
        """Variants of the arithmetic that no published model of these architectures uses."""
        self.number("rope.scaling.factor", 1e-3, 1e6, 1.0)
        scaling = self.keys.text(self.key("rope.scaling.type"), "none")
        if scaling not in ("none", "default"):
            raise self._refusal("rope.scaling.type", f"{scaling!r:.40}", "unscaled rotary embeddings")
        gating = self.integer("expert_gating_func", 0, 1 << 32, _SOFTMAX_GATING)
        if gating not in (0, _SOFTMAX_GATING):
            raise self._refusal("expert_gating_func", f"{gating}", f"softmax ({_SOFTMAX_GATING})")
        scale = self.number("expert_weights_scale", 0.0, 1e6, 1.0)
        if scale not in (0.0, 1.0):
            raise self._refusal("expert_weights_scale", f"{scale}", "1")
        for name in ("expert_weights_norm", "norm_top_k_prob"):
            if not self.keys.flag(self.key(name), True):
                raise self._refusal(name, "false", "normalised expert weights")

    def _refusal(self, name: str, value: str, supported: str) -> UnsupportedError:
        return self.keys.error(UnsupportedError, self.key(name), f"{value}, supported: {supported}")


def _architecture(keys: Metadata) -> str:
    architecture = keys.text("general.architecture")
    kind = keys.text("general.type", "model")
    what = None
    if architecture == "clip" or kind == "mmproj":
        what = "a vision projector: open the model file that it belongs to"
    elif kind == "adapter":
        what = "a LoRA adapter: merge it into its model first"
    elif kind == "imatrix" or architecture == "imatrix":
        what = "an importance matrix for quantising, not a model"
    elif architecture not in ARCHITECTURES:
        what = f"of architecture {architecture!r:.60}: supported are {' and '.join(ARCHITECTURES)}"
    if what:
        raise UnsupportedError(f"{shorten(keys.path)} is {what}")
    return architecture
