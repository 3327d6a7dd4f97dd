"""Requests: configuration, `LLM`, streams and their statistics. Knows nothing of HTTP or terminals."""

from coldstream.decoding import SamplingParams
from coldstream.engine.config import EngineConfig
from coldstream.engine.generation import Stream
from coldstream.engine.llm import LLM
from coldstream.engine.opened_model import OpenedModel, open_model
from coldstream.engine.request import Piece, RequestOutput, Statistics

__all__ = [
    "LLM",
    "EngineConfig",
    "OpenedModel",
    "Piece",
    "RequestOutput",
    "SamplingParams",
    "Statistics",
    "Stream",
    "open_model",
]
