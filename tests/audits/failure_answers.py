"""Questions to a server that is made to fail, and what counts as a right answer or a clear error. Pure.

A question's answer is fixed by its prompt and seed. What came of a request is one of five: *answered* with
every token and log-probability of the undisturbed answer; *refused* with 503 and a time to come back;
*cut off*, a stream with a beginning of that answer and one error at its end; *wrong*, another answer; or
*lost*: anything else, such as a broken connection, or a stream that ends without a word.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Fields = dict[str, Any]
Kind = Literal["answered", "refused", "cut off", "wrong", "lost"]

KINDS: Final[Sequence[Kind]] = ("answered", "refused", "cut off", "wrong", "lost")
UNAVAILABLE: Final = "service_unavailable"
NUM_PREFIXES: Final = 4  # each longer than a block, as shorter ones are not kept in files
MAX_TOKENS: Final = (8, 40, 80, 120)
_WORDS: Final = ("def", "class", "import", "return", "self", "path", "for", "in", "os", "x", "=", "(", "\n")


@dataclass(frozen=True)
class Outcome:
    """What came of one request. Times are seconds of one clock."""

    kind: Kind
    sent_s: float
    ended_s: float
    detail: str = ""  # of a fault
    reused: int = 0  # tokens of the prompt that were kept from before


def questions(count: int, seed: int) -> list[Fields]:
    """Bodies for `/v1/completions` whose prompts share a few long beginnings, greedy and sampled ones."""
    chance = random.Random(seed)

    def words(least: int, most: int) -> str:
        return " ".join(chance.choices(_WORDS, k=chance.randint(least, most)))

    prefixes = [words(270, 400) for _ in range(NUM_PREFIXES)]
    return [
        {
            "prompt": f"{prefixes[number % NUM_PREFIXES]}\n{words(3, 40)}",
            "max_tokens": chance.choice(MAX_TOKENS),
            "temperature": chance.choice((0, 0.8)),
            "seed": number,
            "logprobs": 2,
            "ignore_eos": True,
        }
        for number in range(count)
    ]


def merged(chunks: Sequence[Mapping[str, Any]]) -> Fields:
    """The choice of a whole response, or of its beginning, from the choices of a stream's chunks."""
    choice: Fields = {"index": 0, "text": "", "logprobs": {}}
    for chunk in chunks:
        choice["text"] += chunk["text"]
        for name, values in (chunk["logprobs"] or {}).items():
            choice["logprobs"].setdefault(name, []).extend(values)
        if chunk["finish_reason"] is not None:
            choice |= {name: chunk[name] for name in ("finish_reason", "stop_reason")}
    return choice


def is_beginning(part: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    """Whether a merged choice has the first tokens of `whole`, with their text and log-probabilities."""
    return str(whole["text"]).startswith(part["text"]) and all(
        whole["logprobs"][name][: len(values)] == values for name, values in part["logprobs"].items()
    )


def judged(status: int, headers: Mapping[str, str], body: Any, expected: Fields) -> tuple[Kind, str]:
    """What a response that came at once is, and what is wrong with it."""
    if status == 200:
        choice = body["choices"][0]
        return ("answered", "") if choice == expected else ("wrong", f"{choice} and not {expected}")
    if status != 503 or body["error"]["code"] != UNAVAILABLE:
        return "lost", f"{status}: {body}"
    if not headers.get("retry-after", "").isdecimal() or int(headers["retry-after"]) < 1:
        return "lost", "503 without a time to come back"
    return "refused", ""


def judged_stream(events: Sequence[Any], expected: Fields) -> tuple[Kind, str]:
    """The same of a stream's events, of which `[DONE]` is a text and the others are JSON values."""
    errors = [place for place, event in enumerate(events) if "error" in event]
    if not events or events[-1] != "[DONE]" or events.count("[DONE]") != 1:
        return "lost", f"a stream that ends with {events[-1:]}"
    if errors not in ([], [len(events) - 2]):
        return "lost", f"errors at {errors} of {len(events)} events"
    choice = merged([event["choices"][0] for event in events[: -1 - len(errors)]])
    if not errors:
        return ("answered", "") if choice == expected else ("wrong", f"{choice} and not {expected}")
    if events[-2]["error"]["code"] != UNAVAILABLE:
        return "lost", str(events[-2])
    if "finish_reason" in choice:
        return "lost", "an error behind the end of an answer"
    return ("cut off", "") if is_beginning(choice, expected) else ("wrong", f"{choice} before an error")
