"""The body of a completion request: text goes on from a prompt, without a chat template."""

from typing import Annotated, Any, Final

from pydantic import Field

from coldstream.server.http.fields import MAX_TOP_LOGPROBS, Flag, SamplingFields, Text, Whole
from coldstream.server.http.problems import refused

MAX_PROMPT_TOKENS: Final = 1 << 22

TokenIds = Annotated[list[Whole], Field(max_length=MAX_PROMPT_TOKENS)]


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: Text | TokenIds | list[Text] | list[TokenIds]
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(strict=True, ge=1)] | None = None
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
