"""Reads the hyper-parameters of a model file: one key at a time, with the range that it must lie in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from coldstream.errors import InconsistentError, ModelFormatError, UnsupportedError
from coldstream.gguf.messages import shorten
from coldstream.gguf.metadata import Metadata
from coldstream.gguf.reader import TensorInfo

MAX_BLOCKS: Final = 1024
MAX_NEXTN_LAYERS: Final = 8
MAX_HEADS: Final = 1024

E = TypeVar("E", bound=ModelFormatError)
T = TypeVar("T")


class Hyperparameters:
    """The keys of one model: `integer("block_count", …)` reads `qwen35moe.block_count`.

    `num_blocks` counts all blocks of the file, `num_layers` those of the trunk; the others are MTP blocks.
    Declared MTP blocks of which the file holds not one tensor are in neither: they are
    `num_absent_nextn_layers`. Raises UnsupportedError for a file that is only a part of a model.
    """

    def __init__(self, keys: Metadata, tensors: Mapping[str, TensorInfo], architecture: str) -> None:
        self.keys = keys
        self.tensors = tensors
        self.architecture = architecture
        self._num_declared_blocks = self.integer("block_count", 1, MAX_BLOCKS)
        num_nextn_layers = self._num_nextn_layers()
        self.num_layers = self._num_declared_blocks - num_nextn_layers
        behind = range(self.num_layers, self._num_declared_blocks)
        has_nextn = num_nextn_layers > 0 and self._holds_blocks(behind)
        self.num_nextn_layers = num_nextn_layers if has_nextn else 0
        self.num_absent_nextn_layers = 0 if has_nextn else num_nextn_layers
        self.num_blocks = self.num_layers + self.num_nextn_layers
        trunk = range(self.num_layers)
        if self.num_nextn_layers and not self._holds_blocks(trunk):
            what = "holds only the MTP (draft) block of a model: open the model's own file, with this one as"
            raise UnsupportedError(f"{shorten(keys.path)} {what} --model-draft")

    @property
    def path(self) -> Path:
        """The file, for messages."""
        return self.keys.path

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def value(self, name: str) -> str:
        """The value of a key that is there, as messages show it."""
        return f"{self.keys[self.key(name)]!r:.40}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.keys

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        return self.keys.integer(self.key(name), low, high, default)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        return self.keys.number(self.key(name), low, high, default)

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self.keys.flag(self.key(name), default)

    def text(self, name: str, default: str | None = None) -> str:
        return self.keys.text(self.key(name), default)

    def error(self, kind: type[E], name: str, problem: str) -> E:
        """An exception of `kind` that names the key and where it is."""
        return self.keys.error(kind, self.key(name), problem)

    def inconsistent(self, name: str, problem: str) -> InconsistentError:
        """An error about a key whose value contradicts another statement of the file."""
        return self.error(InconsistentError, name, problem)

    def per_layer(self, name: str, high: int) -> tuple[int, ...]:
        """A number of every layer [num_layers], each 0 … `high`; most files give one number for all."""
        values = self.keys.integers(self.key(name), 0, high)
        return values * self.num_layers if len(values) == 1 else self._of_trunk(name, values)

    def flags_per_layer(self, name: str) -> tuple[bool, ...]:
        """A flag of every layer [num_layers], from an array of bools or of numbers 0 and 1."""
        value = self.keys[self.key(name)]
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            return self._of_trunk(name, tuple(map(bool, self.keys.integers(self.key(name), 0, 1))))
        return self._of_trunk(name, self.keys.flags(self.key(name)))

    def is_array(self, name: str) -> bool:
        """Whether a key that is there has an array of values."""
        return isinstance(self.keys[self.key(name)], np.ndarray)

    def per_block(self, name: str, high: int) -> tuple[int, ...]:
        """A number 1 … `high` of every block [num_blocks].

        A layer whose number is 0, as it has not what is counted, gets that of the layer before it, or of the
        first that has one. MTP blocks get that of the last layer.
        """
        values = self.per_layer(name, high)
        number = next((value for value in values if value), 0)
        if not number:
            raise self.inconsistent(name, f"0, expected 1 to {high}")
        found = []
        for value in (*values, *[0] * self.num_nextn_layers):
            number = value or number
            found.append(number)
        return tuple(found)

    def uniform(self, name: str, high: int) -> int:
        """The one number 1 … `high` of all layers that have it; 0 says that a layer has not."""
        values = {value for value in self.per_layer(name, high) if value}
        if not values:
            raise self.inconsistent(name, f"0, expected 1 to {high}")
        if len(values) > 1:
            problem = f"differs between layers ({sorted(values)}), which is not supported"
            raise self.error(UnsupportedError, name, problem)
        return values.pop()

    def num_rows(self, tensor: str) -> int:
        """Of a matrix of the file; 0 if it is not there."""
        return self.tensors[tensor].shape[0] if tensor in self.tensors else 0

    def _of_trunk(self, name: str, values: tuple[T, ...]) -> tuple[T, ...]:
        """`values` of all blocks or of the trunk, without those of MTP blocks."""
        if len(values) not in (self.num_layers, self._num_declared_blocks):
            raise self.inconsistent(name, f"{len(values)} values for {self.num_layers} layers")
        return values[: self.num_layers]

    def _num_nextn_layers(self) -> int:
        """MTP blocks: as declared, or as found where a converter kept the tensors and dropped the key."""
        declared = self.integer("nextn_predict_layers", 0, MAX_NEXTN_LAYERS, 0)
        found = 0
        while f"blk.{self._num_declared_blocks - 1 - found}.nextn.eh_proj.weight" in self.tensors:
            found += 1
        num_nextn_layers = max(declared, found)
        if num_nextn_layers >= self._num_declared_blocks:
            problem = f"{self._num_declared_blocks}, all of them MTP blocks: the file holds no layer to run"
            raise self.inconsistent("block_count", problem)
        return num_nextn_layers

    def _holds_blocks(self, blocks: range) -> bool:
        """Whether the file holds any tensor of these blocks."""
        prefixes = tuple(f"blk.{block}." for block in blocks)
        return any(name.startswith(prefixes) for name in self.tensors)
