"""Models with and without drafts, and requests with a grammar, for tests of several files."""

import json
from dataclasses import replace
from typing import Any

from coldstream.assets import demo_model_path
from coldstream.decoding import FixedSizes, Grammar, Speculation
from coldstream.engine import LLM, EngineConfig, SamplingParams, open_model

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 9},
    },
    "required": ["x", "name"],
    "additionalProperties": False,
}
PROMPT = 'points = [{"x": 1, "name": "a"}, {"x": 2, "name": "b"}, '


def opened_demo(spec_type: str) -> LLM:
    """The demo model on the CPU, which drafts 8 tokens in every step if it drafts."""
    opened = open_model(EngineConfig(str(demo_model_path()), device="cpu", spec_type=spec_type))
    if opened.speculation is not None:
        opened = replace(opened, speculation=Speculation(opened.speculation.drafter, FixedSizes(8)))
    return LLM.from_opened(opened)


def answer(llm: LLM, grammar: Grammar, prompt: str = PROMPT, **params: Any) -> Any:
    wanted = {"temperature": 0.9, "seed": 5, "max_tokens": 400, "grammar": grammar} | params
    return llm.generate(prompt, SamplingParams(**wanted))[0]


def of_schema(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))
