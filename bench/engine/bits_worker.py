"""One commit of a comparison of bits: prints digests of logits, by what they are of.

    python bits_worker.py '{"model": "model.gguf", "device": "cpu"}' [TIER]

The first argument has the keyword arguments of `LLM`; TIER is one of CPU instructions. Imports nothing of
`bench`, as it runs with the sources of another commit.
"""

import hashlib
import json
import random
import sys

from coldstream import LLM, SamplingParams
from coldstream.kernels import _csrc

PROMPTS = (1, 9, 70, 300)  # tokens
NUM_SIDE_BY_SIDE, NEW_TOKENS, MOST_ID = 5, 48, 200


def random_ids(count: int, seed: int) -> list[int]:
    """Token ids that every model has."""
    chooser = random.Random(seed)
    return [chooser.randrange(MOST_ID) for _ in range(count)]


def choose_tier(tier: str) -> None:
    """All kernels are those of this tier: there is no public way to ask for one."""
    made = _csrc.Runtime
    _csrc.Runtime = lambda threads, _="auto": made(threads, tier)  # type: ignore[assignment,misc]


def digests(llm: LLM) -> dict[str, str]:
    """Of whole prompts, by their length, and of texts alone and side by side with their log-probabilities."""
    found = {
        f"logits of {count}": hashlib.sha256(llm.logits(random_ids(count, count)).tobytes()).hexdigest()
        for count in PROMPTS
    }
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    prompts = [random_ids(7 + 5 * number, number) for number in range(NUM_SIDE_BY_SIDE)]
    for name, asked in (("one text", prompts[:1]), (f"{NUM_SIDE_BY_SIDE} texts", prompts)):
        outputs = llm.generate(asked, params)
        answers = [output.outputs[0] for output in outputs]
        texts = [(list(each.token_ids), float(each.cumulative_logprob or 0).hex()) for each in answers]
        found[name] = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    return found


def main() -> None:
    if len(sys.argv) > 2:
        choose_tier(sys.argv[2])
    with LLM(**json.loads(sys.argv[1])) as llm:
        print(json.dumps(digests(llm)))


if __name__ == "__main__":
    main()
