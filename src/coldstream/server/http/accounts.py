"""What is reported of an answer beside its text: its end, counts, times and progress.

In the shapes of OpenAI's API and, where that has none, of llama.cpp's server.
"""

import time
from collections.abc import Sequence
from typing import Any

from coldstream.engine.events import Delta, Event, PromptProgress, Started
from coldstream.engine.request import Piece, Statistics


def ending_of(piece: Piece, *, has_calls: bool = False) -> dict[str, Any]:
    """Why an answer ended, from its last piece: `finish_reason`, and vLLM's `stop_reason`, which says more.

    An answer that was stopped as it repeated itself counts as cut off.
    """
    reason: str = piece.ending()[0]
    stop_reason: int | str | None = piece.stop_reason
    if reason not in ("stop", "length"):
        reason, stop_reason = "length", reason
    if has_calls and reason == "stop":
        reason = "tool_calls"
    return {"finish_reason": reason, "stop_reason": stop_reason}


class PromptProgressReports:
    """llama.cpp's `prompt_progress` of one prompt, from what the cache had to the whole prompt.

    `processed` begins with `cache`, only grows, and ends with `total` before the answer begins. began: of the
    request, of `time.monotonic`.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._total = self._cache = 0
        self._processed = -1

    def of(self, event: Event) -> dict[str, Any] | None:
        """The report that an event of the prompt gives, if it gives one."""
        match event:
            case Started(num_reused=reused, prompt_tokens=total):
                self._cache, self._total = reused, total
                return self._report(reused)
            case PromptProgress(done=done):
                return self._report(done)
            case Delta():
                return self._report(self._total)
            case _:
                return None

    def _report(self, processed: int) -> dict[str, Any] | None:
        if processed <= self._processed:
            return None
        self._processed = processed
        elapsed_ms = int(1000 * (time.monotonic() - self._began))
        return {
            "total": self._total,
            "cache": self._cache,
            "processed": processed,
            "time_ms": elapsed_ms,
        }


def usage(of_prompts: Sequence[Sequence[Statistics]], reasoning_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's `usage`, of the answers to each prompt. A prompt with several answers is counted once."""
    prompt = sum(answers[0].prompt_tokens for answers in of_prompts)
    cached = sum(answers[0].reused_tokens for answers in of_prompts)
    every = [each for answers in of_prompts for each in answers]
    generated = sum(each.generated_tokens for each in every)
    accepted, drafted = _drafts(every)
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    if reasoning_tokens is not None:
        details["reasoning_tokens"] = min(reasoning_tokens, generated)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": details,
    }


def timings(of_prompts: Sequence[Sequence[Statistics]]) -> dict[str, Any]:
    """llama.cpp's `timings`. Answers that were computed side by side count by the one that took longest. The
    first token of each comes with the prompt, so rates are of those after it.
    """
    first = [answers[0] for answers in of_prompts]
    every = [each for answers in of_prompts for each in answers]
    computed = sum(each.prompt_tokens - each.reused_tokens for each in first)
    generated = sum(each.generated_tokens for each in every)
    prompt_ms = 1000 * max(each.time_to_first_token_s for each in first)
    after_first = sum(max(0, each.generated_tokens - 1) for each in every)
    generated_ms = 1000 * max(each.generation_s for each in every)
    accepted, drafted = _drafts(every)
    drafts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
    return {
        "cache_n": sum(each.reused_tokens for each in first),
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, computed),
        "prompt_per_second": _ratio(1000 * computed, prompt_ms),
        "predicted_n": generated,
        "predicted_ms": generated_ms,
        "predicted_per_token_ms": _ratio(generated_ms, after_first),
        "predicted_per_second": _ratio(1000 * after_first, generated_ms),
        **drafts,
    }


def _drafts(every: Sequence[Statistics]) -> tuple[int, int]:
    """Accepted and drafted tokens."""
    found = [each.speculation for each in every if each.speculation is not None]
    return sum(each.accepted for each in found), sum(each.drafted for each in found)


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else 0.0
