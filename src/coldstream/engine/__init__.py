"""Requests: configuration, `LLM`, streams and their statistics. Knows nothing of HTTP or terminals."""

from coldstream.decoding import Grammar, RepetitionStop, SamplingParams, Thought
from coldstream.engine.llm import LLM
from coldstream.engine.opened_model import OpenedModel, open_model
from coldstream.engine.prompts import TextPrompt, TokensPrompt
from coldstream.engine.request import CompletionOutput, Logprob, Piece, RequestOutput, Statistics
from coldstream.engine.stream import Stream
from coldstream.kernels.experts.executor import Executor
from coldstream.placement.policies import Policy
from coldstream.planning.config import EngineConfig

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Executor",
    "Grammar",
    "Logprob",
    "OpenedModel",
    "Piece",
    "Policy",
    "RepetitionStop",
    "RequestOutput",
    "SamplingParams",
    "Statistics",
    "Stream",
    "TextPrompt",
    "Thought",
    "TokensPrompt",
    "open_model",
]
