"""GGUF files: reading them strictly, the geometry of their blocks, their tokenizer and chat template."""

from coldstream.gguf.chat_template import ChatTemplate, RenderedChat
from coldstream.gguf.hub import CachedModel, Hub, list_cached, pull, resolve_model
from coldstream.gguf.metadata import Metadata, Value
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.gguf.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "CachedModel",
    "ChatTemplate",
    "GGUFFile",
    "Hub",
    "Metadata",
    "QuantType",
    "RenderedChat",
    "StreamDecoder",
    "TensorInfo",
    "Tokenizer",
    "Value",
    "list_cached",
    "pull",
    "resolve_model",
]
