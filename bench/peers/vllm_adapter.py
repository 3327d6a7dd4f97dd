"""A plugin for pytest: vLLM's tests of parsers run against this package's parser of answers.

Names that the tests import of vLLM are those below. A parser here has vLLM's methods and gives the text to an
`OutputParser`; what it tells is put into the shapes that the tests read. Names that are not here stand for
parts of vLLM without a counterpart: whoever uses one raises NoCounterpart. `foreign_cases.py` starts it.
"""

import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from coldstream.gguf.tokenizer import marked
from coldstream.server.output import (
    AnswerParser,
    Content,
    OutputEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    output_parser,
)
from coldstream.server.output.call_format import num_held

HERMES = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
XML = "<tool_call>\n<function=f>\n<parameter=p>\n</parameter>\n</function>\n</tool_call>"
ARGS = "<tool_call>{name}<arg_key>{k}</arg_key><arg_value>{v}</arg_value></tool_call>"
GEMMA = "<|tool_call>call: <|channel>thought"
GEMMA_TOKENS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
ANY_TOOL = {"name": "_"}  # tests give no tools, without which calls are content


class NoCounterpart(Exception):
    """A part of vLLM that this package does not have."""


@dataclass
class FunctionCall:
    name: str
    arguments: str = ""


@dataclass
class ToolCall:
    function: FunctionCall
    id: str = ""
    type: str = "function"


@dataclass
class DeltaFunctionCall:
    name: str | None = None
    arguments: str | None = None


@dataclass
class DeltaToolCall:
    index: int
    id: str | None = None
    type: str | None = None
    function: DeltaFunctionCall = field(default_factory=DeltaFunctionCall)


@dataclass
class DeltaMessage:
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = field(default_factory=list)


@dataclass
class ExtractedToolCallInformation:
    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


@dataclass
class FunctionDefinition:
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatCompletionToolsParam:
    def __init__(self, function: Any, type: str = "function") -> None:
        self.type = type
        if isinstance(function, Mapping):
            known = ("name", "description", "parameters")
            function = FunctionDefinition(**{name: function.get(name) for name in known})
        self.function = function


class ChatCompletionRequest:
    def __init__(self, **fields: Any) -> None:
        self.tools = None
        self.__dict__.update(fields)

    @classmethod
    def model_validate(cls, fields: Mapping[str, Any]) -> "ChatCompletionRequest":
        tools = [ChatCompletionToolsParam(**tool) for tool in fields.get("tools") or ()]
        return cls(**{**fields, "tools": tools or None})


class Words:
    """A tokenizer with a token for each tag, word, and run of blanks."""

    _TAGS = (
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        *GEMMA_TOKENS,
        "<|turn>",
        "<turn|>",
        "<|think|>",
    )
    _PARTS = re.compile(rf"{'|'.join(map(re.escape, _TAGS))}| ?\w+|\s+|.", re.DOTALL)

    def __init__(self) -> None:
        self._ids = {tag: index for index, tag in enumerate(self._TAGS)}

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int]:
        return [self._ids.setdefault(token, len(self._ids)) for token in tokens]

    def tokenize(self, text: str) -> list[str]:
        return self._PARTS.findall(text)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self._ids.setdefault(part, len(self._ids)) for part in self.tokenize(text)]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(list(self._ids)[token_id] for token_id in ids)

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        return "".join(tokens)

    def get_vocab(self) -> dict[str, int]:
        return self._ids


def detokenize_incrementally(tokenizer: Words, all_input_ids: Sequence[int], **_: Any) -> Any:
    text = tokenizer.decode(all_input_ids[-1:])
    return [text], text, 0, 0


class ToolParser:
    """vLLM's interface of a parser of calls, over ours."""

    template = ""

    def __init__(self, tokenizer: Words, tools: Sequence[Any] | None = None, **_: Any) -> None:
        self.model_tokenizer, self.vocab = tokenizer, tokenizer.get_vocab()
        self._tools = list(tools or ())
        self._parser: AnswerParser | None = None

    def _begin(self, request: Any) -> AnswerParser:
        tools = [*self._tools, *(getattr(request, "tools", None) or ())]
        return output_parser(self.template, [*map(_as_dict, tools), ANY_TOOL], is_thinking=False)

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        parser = self._begin(request)
        delta = _delta([*parser.push(model_output), *parser.finish()])
        calls: list[ToolCall] = []
        for call in delta.tool_calls:
            function = FunctionCall(call.function.name or "", call.function.arguments or "")
            calls.append(ToolCall(function, call.id or ""))
        return ExtractedToolCallInformation(bool(calls), calls, delta.content)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *_: Any, request: Any = None, **__: Any
    ) -> DeltaMessage | None:
        if current_text == delta_text or self._parser is None:
            self._parser = self._begin(request or (_[-1] if _ else None))
        delta = _delta(self._parser.push(delta_text))
        return delta if delta.content or delta.tool_calls else None


class HermesToolParser(ToolParser):
    template = HERMES


class XmlToolParser(ToolParser):
    template = XML


class ArgToolParser(ToolParser):
    template = ARGS


class Marking:
    """Text in which control tokens are spelt → text in which they are marked, in any pieces."""

    _TOKEN = re.compile("|".join(map(re.escape, GEMMA_TOKENS)))

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        held = num_held(text, GEMMA_TOKENS)
        self._held = text[len(text) - held :]
        return self._marked(text[: len(text) - held])

    def finish(self) -> str:
        return self._marked(self._held)

    def _marked(self, text: str) -> str:
        return self._TOKEN.sub(lambda match: marked(match[0]), text)


class MarkedParser:
    """An `OutputParser` of gemma-4 that is given spelt tokens."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parser, self._marking = output_parser(GEMMA, tools, is_thinking=False), Marking()

    def push(self, text: str) -> list[OutputEvent]:
        return self._parser.push(self._marking.push(text))

    def finish(self) -> list[OutputEvent]:
        return [*self._parser.push(self._marking.finish()), *self._parser.finish()]


class GemmaToolParser(ToolParser):
    template = GEMMA

    def _begin(self, request: Any) -> Any:
        tools = [*self._tools, *(getattr(request, "tools", None) or ())]
        return MarkedParser([*map(_as_dict, tools), ANY_TOOL])


class ReasoningParser:
    """vLLM's interface of a parser of thoughts, over ours."""

    def __init__(self, tokenizer: Words, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.model_tokenizer, self.vocab = tokenizer, tokenizer.get_vocab()
        self._is_thinking = bool((chat_template_kwargs or {}).get("enable_thinking", True))
        self._parser: AnswerParser | None = None
        self._has_call = False

    def _begin(self) -> AnswerParser:
        tools = [{"name": "bash"}]
        return output_parser(f"{XML}</think>", tools, is_thinking=self._is_thinking)

    def extract_reasoning(self, model_output: str, **_: Any) -> tuple[str | None, str | None]:
        parser = self._begin()
        delta = _delta([*parser.push(model_output), *parser.finish()])
        # Here a call is no text: vLLM leaves it in the content, for its parser of calls.
        call = model_output[model_output.index("<tool_call>") :] if delta.tool_calls else ""
        return delta.reasoning, f"{delta.content or ''}{call}" or None

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *_: Any, **__: Any
    ) -> DeltaMessage | None:
        if not previous_text or self._parser is None:
            self._parser, self._has_call = self._begin(), False
        delta = _delta(self._parser.push(delta_text))
        if self._has_call:
            return DeltaMessage(content=delta_text)
        if delta.tool_calls:
            self._has_call = True
            return DeltaMessage(content=current_text[current_text.index("<tool_call>") :])
        return delta if delta.content or delta.reasoning else None

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether what would follow these tokens is content."""
        parser = self._begin()
        text = self.model_tokenizer.decode(input_ids)
        return any(isinstance(event, Content) for event in _after(parser, text))


def _after(parser: Any, text: str) -> list[OutputEvent]:
    """What a character behind a text is."""
    parser.push(text)
    return [*parser.push("x"), *parser.finish()]


class GemmaReasoningParser(ReasoningParser):
    """The same over gemma-4's channel."""

    def _begin(self) -> Any:
        return MarkedParser([{"name": "bash"}])


class Manager:
    """The parsers by vLLM's names."""

    _PARSERS: ClassVar = {
        "hermes": HermesToolParser,
        "qwen3_coder": XmlToolParser,
        "qwen3_xml": XmlToolParser,
        "glm45": ArgToolParser,
        "glm47": ArgToolParser,
        "poolside_v1": ArgToolParser,
        "gemma4": GemmaToolParser,
    }

    @classmethod
    def get_tool_parser(cls, name: str) -> type[ToolParser]:
        return cls._PARSERS[name]

    @classmethod
    def get_reasoning_parser(cls, name: str) -> type[ReasoningParser]:
        if name == "gemma4":
            return GemmaReasoningParser
        if not name.startswith(("qwen3", "glm4")):
            raise NoCounterpart(f"the reasoning parser {name}")
        return ReasoningParser


def _as_dict(tool: Any) -> dict[str, Any]:
    function = getattr(tool, "function", tool)
    return {"name": function.name, "parameters": function.parameters or {}}


def _delta(events: Sequence[OutputEvent]) -> DeltaMessage:
    """What events tell, as one message of a stream."""
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls: dict[int, DeltaToolCall] = {}
    for event in events:
        match event:
            case ToolCallStart(index, call_id, name):
                calls[index] = DeltaToolCall(index, call_id, "function", DeltaFunctionCall(name, ""))
            case ToolCallArguments(index, fragment):
                call = calls.setdefault(index, DeltaToolCall(index))
                call.function.arguments = (call.function.arguments or "") + fragment
    return DeltaMessage(None, content or None, reasoning or None, list(calls.values()))


NAMES: dict[str, Any] = {
    **{
        each.__name__: each
        for each in (
            *(FunctionCall, ToolCall, DeltaFunctionCall, DeltaToolCall, DeltaMessage, ToolParser),
            *(ExtractedToolCallInformation, FunctionDefinition, ChatCompletionToolsParam, ReasoningParser),
            *(ChatCompletionRequest, detokenize_incrementally),
        )
    },
    "ToolParserManager": Manager,
    "ReasoningParserManager": Manager,
    "TokenizerLike": Words,
    "get_tokenizer": lambda *_, **__: Words(),
    "is_mistral_tokenizer": lambda _: False,
    "Hermes2ProToolParser": HermesToolParser,
    "Qwen3CoderToolParser": XmlToolParser,
    "Qwen3EngineToolParser": XmlToolParser,
    "Glm47MoeModelToolParser": ArgToolParser,
    "Glm4MoeModelToolParser": ArgToolParser,
    "PoolsideV1ToolParser": ArgToolParser,
    "Gemma4EngineToolParser": GemmaToolParser,
    "TOOL_CALL_START": "<|tool_call>",
    "TOOL_CALL_END": "<tool_call|>",
}


class _Module(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NAMES.get(name) or _without_counterpart(f"{self.__name__}.{name}")


def _without_counterpart(name: str) -> type:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NoCounterpart(name)

    return type(name.rpartition(".")[2], (), {"__init__": refuse})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        is_theirs = name.partition(".")[0] in ("vllm", "xgrammar")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_theirs else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _install() -> None:
    """Puts the names in place of vLLM's, and the tokenizer in place of those that would be fetched."""
    import transformers

    sys.meta_path.insert(0, _Finder())
    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: Words()


_install()  # now, as files of configuration import vLLM before any hook is called
_RESULTS: list[dict[str, str]] = []


def pytest_runtest_logreport(report: Any) -> None:
    """Keeps the outcome of each case; of one that fails, the error."""
    is_outcome = report.when == "call" or (report.when == "setup" and not report.passed)
    if is_outcome:
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
        outcome = "expected to fail" if hasattr(report, "wasxfail") else report.outcome
        _RESULTS.append({"case": report.nodeid, "outcome": outcome, "error": str(crash)[:400]})


def pytest_sessionfinish() -> None:
    """Writes the outcomes for `foreign_cases.py`."""
    Path(os.environ["FOREIGN_CASES_OUT"]).write_text(json.dumps(_RESULTS))
