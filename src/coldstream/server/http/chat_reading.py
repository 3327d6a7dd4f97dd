"""From the body of a chat request to what the engine computes, and to the parsers of its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from coldstream.decoding import Grammar, RepetitionStop
from coldstream.engine.answer import Request as EngineRequest
from coldstream.server.http.chat_answer import ChatAnswer
from coldstream.server.http.chat_request import (
    ChatRequest,
    check_served,
    messages_for_template,
    template_settings_of,
)
from coldstream.server.http.fields import sampling_of
from coldstream.server.http.models import context_errors
from coldstream.server.http.settings import ServerSettings
from coldstream.server.http.volatile_lines import without_volatile
from coldstream.server.output import (
    MAX_CALLS,
    AnswerParser,
    constrained_answer,
    forced_calls,
    marks_control_tokens,
    output_parser,
    prompt_opens_thought,
    thought_after,
    writes_harmony,
)
from coldstream.server.served_model import ServedModel

_TAIL_TOKENS: Final = 16  # last tokens of a prompt, which hold the tag that opens or closes a thought

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation that can be computed."""

    body: ChatRequest
    served: ServedModel
    request: EngineRequest
    tools: Tools  # tools that the answer may call
    prompt_end: str  # the last tokens of the prompt as text
    _parsers: list[AnswerParser] = field(default_factory=list)  # one parser for each answer

    @property
    def max_calls(self) -> int:
        """Calls of an answer, with which it is complete."""
        return most_calls(self.body)

    @property
    def is_complete(self) -> bool:
        """Whether every answer has as many calls as it may have, so that nothing is left to say."""
        return bool(self._parsers) and all(parser.is_complete for parser in self._parsers)

    @property
    def is_thinking(self) -> bool:
        """Whether the prompt ends inside a thought."""
        return prompt_opens_thought(self.prompt_end)

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        self._parsers.append(
            output_parser(
                self.served.template_source or "",
                self.tools,
                is_thinking=self.is_thinking,
                max_calls=self.max_calls,
                prompt_end=self.prompt_end,
            )
        )
        return self._parsers[-1]

    def answers(self) -> list[ChatAnswer]:
        """Empty answers, one for each that was asked for."""
        tokenizer, num_top = self.served.tokenizer, self.body.num_logprobs
        return [
            ChatAnswer(
                self.parser(),
                tokenizer,
                num_top,
                custom_names=self.body.custom_names,
            )
            for _ in range(self.request.params.n)
        ]


def read_chat(body: ChatRequest, served: ServedModel, settings: ServerSettings) -> ChatPrompt:
    """Render and encode a conversation; this blocks. Raises ProblemError and InvalidRequestError."""
    check_served(body)
    tools = [tool.model_dump(exclude_unset=True) for tool in body.usable_tools]
    source = served.template_source or ""
    grammar = _grammar(body, tools, source)
    params = sampling_of(
        body,
        served.default_sampling,
        settings,
        max_tokens=body.most_tokens,
        logprobs=body.num_logprobs,
        grammar=grammar,
        repetition=RepetitionStop() if body.stop_repetition else None,
    )
    if marks_control_tokens(source, served.tokenizer.vocabulary.control_ids):
        params = replace(params, marks_control_tokens=True)
    with context_errors(served, "messages"):
        messages, template_settings = _for_template(body, tools, settings)
        request = served.requests.of_chat(messages, params, template_settings)
    tail = served.tokenizer.decode(request.prompt_token_ids[-_TAIL_TOKENS:], skip_special=False)
    has_thought = not body.continue_final_message
    is_behind_thought = grammar is not None or body.thinking_budget is not None
    if has_thought and is_behind_thought and not (grammar and writes_harmony(source)):
        thought = thought_after(source, tail, budget=body.thinking_budget, tools=tools)
        request = replace(request, params=replace(params, thought=thought))
    return ChatPrompt(body, served, request, tools, tail)


def rendered_chat(body: ChatRequest, served: ServedModel, settings: ServerSettings) -> str:
    """The prompt that the chat template writes, of any length; this blocks. Raises ProblemError."""
    check_served(body)
    tools = [tool.model_dump(exclude_unset=True) for tool in body.usable_tools]
    messages, template_settings = _for_template(body, tools, settings)
    return served.chat_template.render(messages, **template_settings).text


def _for_template(
    body: ChatRequest, tools: Tools, settings: ServerSettings
) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """The messages for the chat template, and its settings."""
    messages = messages_for_template(body)
    if settings.drop_volatile:
        messages = without_volatile(messages)
    return messages, template_settings_of(body, tools, settings.chat_template_kwargs)


def most_calls(body: ChatRequest) -> int:
    """The calls that an answer may have."""
    return 1 if body.parallel_tool_calls is False else MAX_CALLS


def _grammar(body: ChatRequest, tools: Tools, source: str) -> Grammar | None:
    """What the answer is made to match: a call that is demanded, or a format. With tools that may be called,
    it is text of the format or calls.
    """
    demanded, budget = body.demanded_call, body.thinking_budget
    if isinstance(demanded, str):
        named = [tool for tool in tools if tool["function"]["name"] == demanded]
        return forced_calls(source, named, thinking_budget=budget)
    if demanded:
        return forced_calls(source, tools, most_calls=most_calls(body), thinking_budget=budget)
    if body.constraint is None or (body.continue_final_message and writes_harmony(source)):
        return body.constraint
    return constrained_answer(
        source, body.constraint, tools, most_calls=most_calls(body), thinking_budget=budget
    )
