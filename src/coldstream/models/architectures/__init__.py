"""The families of models that can be opened: one file each, and its line in the table here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from coldstream.errors import UnsupportedError
from coldstream.gguf.messages import shorten
from coldstream.gguf.metadata import Metadata
from coldstream.models.architectures.architecture import Architecture, GatheredRows
from coldstream.models.architectures.gemma4 import GEMMA4
from coldstream.models.architectures.gpt_oss import GPT_OSS
from coldstream.models.architectures.laguna import LAGUNA
from coldstream.models.architectures.qwen3moe import QWEN3MOE
from coldstream.models.architectures.qwen3next import QWEN3NEXT
from coldstream.models.architectures.qwen4exp import QWEN4EXP
from coldstream.models.architectures.qwen35 import QWEN35, QWEN35MOE

_FAMILIES: Final = (QWEN35, QWEN35MOE, QWEN3MOE, QWEN3NEXT, QWEN4EXP, LAGUNA, GPT_OSS, GEMMA4)
ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {architecture.name: architecture for architecture in _FAMILIES}
)

__all__ = ["ARCHITECTURES", "Architecture", "GatheredRows", "architecture_of"]


def architecture_of(keys: Metadata) -> Architecture:
    """The family that a file names. UnsupportedError if it is unknown, or if the file is no model."""
    name = keys.text("general.architecture")
    kind = keys.text("general.type", "model")
    if name == "clip" or kind == "mmproj":
        what = "a vision projector: open the model file that it belongs to"
    elif kind == "adapter":
        what = "a LoRA adapter: merge it into its model first"
    elif kind == "imatrix" or name == "imatrix":
        what = "an importance matrix for quantising, not a model"
    elif "dflash" in name:
        what = "a DFlash drafter: open the model that it drafts for, with this file as --model-draft"
    elif name not in ARCHITECTURES:
        *others, last = ARCHITECTURES
        what = f"of architecture {name!r:.60}: supported are {', '.join(others)} and {last}"
    else:
        return ARCHITECTURES[name]
    raise UnsupportedError(f"{shorten(keys.path)} is {what}")
