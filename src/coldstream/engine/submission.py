"""What the engine is asked for: a request, and how it is to be treated."""

from dataclasses import dataclass
from typing import Final

from coldstream.engine.answer import Request
from coldstream.errors import ContextFullError, InvalidRequestError, shown

MAX_PRIORITY: Final = 100


@dataclass(frozen=True)
class Submission:
    """A request for `Engine.add`."""

    request_id: int  # unique for the life of the engine, chosen by the caller
    request: Request
    boundaries: tuple[int, ...] = ()  # positions in the prompt worth keeping for later prompts
    namespace: str = ""  # `OWNER` or `OWNER/PART`: prefixes are shared within a namespace only
    priority: int = 0  # from −MAX_PRIORITY to MAX_PRIORITY; the higher is served first
    deadline: float | None = None  # by the engine's clock: when it has to be finished
    progress: bool = False  # whether `PromptProgress` events are wanted

    @property
    def owner(self) -> str:
        """Whose request it is. Owners share the engine evenly, whatever parts they name."""
        return self.namespace.partition("/")[0]

    def check(self, vocab_size: int, ctx_size: int) -> None:
        """Raises InvalidRequestError for what a model of this vocabulary and context cannot serve, and its
        child ContextFullError for a prompt that leaves no room for an answer.
        """
        ids, most = self.request.prompt_token_ids, self.request.max_tokens
        if not ids or not all(0 <= token_id < vocab_size for token_id in ids):
            raise InvalidRequestError(
                f"request {self.request_id}: the prompt must be one or more token ids in 0 … {vocab_size - 1}"
            )
        if len(ids) >= ctx_size:
            raise ContextFullError(
                f"request {self.request_id}: a prompt of {len(ids)} tokens leaves no room for an answer in a "
                f"context of {ctx_size}: send a shorter one, or try a larger --ctx-size"
            )
        if not 1 <= most <= ctx_size - len(ids):
            raise InvalidRequestError(
                f"request {self.request_id}: max_tokens must be from 1 to {ctx_size - len(ids)} after "
                f"{len(ids)} tokens of prompt, not {most}"
            )
        if not all(0 < each <= len(ids) for each in self.boundaries):
            raise InvalidRequestError(
                f"request {self.request_id}: boundaries must be positions from 1 to {len(ids)}, "
                f"not {shown(self.boundaries)}"
            )
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise InvalidRequestError(
                f"request {self.request_id}: priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, "
                f"not {self.priority}"
            )
