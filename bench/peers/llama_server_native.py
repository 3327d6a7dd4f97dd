"""llama.cpp's own form of completions in terms of OpenAI's: of a request, and of what comes back. And what it
sends otherwise in a stream of a chat.

`coldstream serve` has OpenAI's form only. What that does not have, such as ids of tokens and the settings
that were used, is not made up.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

ROUTES: Final = ("/completion", "/completions")
STOPS: Final = {"length": "limit", "stop": "eos"}

Fields = dict[str, Any]


def request_of(body: Mapping[str, Any]) -> Fields:
    """The body of a request for /v1/completions."""
    fields = {name: value for name, value in body.items() if name not in ("n_predict", "n_probs")}
    if body.get("n_predict", -1) >= 0:
        fields["max_tokens"] = body["n_predict"]
    if "n_probs" in body:
        fields["logprobs"] = body["n_probs"]
    if isinstance(bias := body.get("logit_bias"), list):
        fields["logit_bias"] = {str(token): value for token, value in bias}
    prompt = body.get("prompt")
    if isinstance(prompt, dict) and set(prompt) == {"prompt_string"}:
        fields["prompt"] = prompt["prompt_string"]
    return fields


def answer_of(answer: Mapping[str, Any]) -> Fields | list[Fields]:
    """What a whole answer says: one completion, or a list of those of several prompts."""
    found = [
        {
            "index": choice["index"],
            "content": choice["text"],
            **_ending(choice, answer),
            "tokens_predicted": answer["usage"]["completion_tokens"],
        }
        for choice in answer["choices"]
    ]
    return found[0] if len(found) == 1 else found


def lines_of(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream."""
    for line in lines:
        name, _, data = line.partition(b": ")
        if name != b"data" or data == b"[DONE]":
            yield line
            continue
        chunk = json.loads(data)
        for choice in chunk.get("choices") or [{"index": 0, "text": "", "finish_reason": None}]:
            event = {"index": choice["index"], "content": choice["text"], "stop": False}
            if choice["finish_reason"] is not None:
                event |= _ending(choice, chunk)
            event |= {name: chunk[name] for name in ("prompt_progress", "error") if name in chunk}
            yield b"data: " + json.dumps(event).encode()


def lines_of_chat(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a chat's stream, with null for the empty text beside the role, as llama.cpp has it."""
    for line in lines:
        yield line.replace(b'"role":"assistant","content":""', b'"role":"assistant","content":null', 1)


def _ending(choice: Mapping[str, Any], answer: Mapping[str, Any]) -> Fields:
    kind = "word" if isinstance(choice.get("stop_reason"), str) else STOPS[choice["finish_reason"]]
    return {"stop": True, "stop_type": kind, "timings": answer.get("timings")}
