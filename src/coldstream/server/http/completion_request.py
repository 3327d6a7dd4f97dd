"""The body of a completion request: text goes on from a prompt, without a chat template."""

from typing import Annotated, Any, Final

from pydantic import Discriminator, Field, Tag

from coldstream.server.http.constraint_fields import ConstraintFields
from coldstream.server.http.fields import MAX_TOP_LOGPROBS, Flag, SamplingFields, Text, Whole
from coldstream.server.http.problems import refused

MAX_PROMPT_TOKENS: Final = 1 << 20

TokenIds = Annotated[list[Whole], Field(max_length=MAX_PROMPT_TOKENS)]


def _kind_of(prompt: Any) -> str | None:
    """What a prompt is by its first entry, so that it is not validated as all that it might be."""
    if not isinstance(prompt, list):
        return "Text" if isinstance(prompt, str) else None
    first = prompt[0] if prompt else ""
    kinds = {int: "TokenIds", str: "Texts", list: "TokenLists"}
    return kinds.get(type(first))


Prompt = Annotated[
    Annotated[Text, Tag("Text")]
    | Annotated[TokenIds, Tag("TokenIds")]
    | Annotated[list[Text], Tag("Texts")]
    | Annotated[list[TokenIds], Tag("TokenLists")],
    Discriminator(
        _kind_of,
        custom_error_type="prompt",
        custom_error_message="Input should be a text, token ids, or a list of either",
    ),
]


class CompletionRequest(ConstraintFields, SamplingFields):
    """The body of POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(strict=True, ge=1)] | None = None
    skip_special_tokens: Flag | None = None  # a chat's control tokens are for its parser
    echo: Flag | None = None
    suffix: Any = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token_id for token_id in self.prompt if isinstance(token_id, int)]]
        return [each for each in self.prompt if not isinstance(each, int)]


def check_completion(request: CompletionRequest, max_prompts: int) -> None:
    """Raises ProblemError for what the API has and this server has not."""
    if request.echo:
        raise refused("echo: prompts are not sent back; their tokens come from POST /tokenize", "echo")
    if request.suffix:
        raise refused("suffix: text is only written after a prompt, not into it", "suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise refused("best_of: must be n, which gives all answers", "best_of")
    if not 1 <= len(request.prompts) <= max_prompts:
        raise refused(f"prompt: 1 to {max_prompts} prompts are served at once", "prompt")
