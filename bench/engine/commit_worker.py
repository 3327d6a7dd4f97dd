"""One commit of a comparison: answers requests through the public interface that all commits have.

    python commit_worker.py '{"model": "model.gguf", "device": "cpu"}'

The argument has the keyword arguments of `LLM`. A line of JSON in, with `prompts` (lists of token ids) and
`new_tokens` of each, gives one out: seconds of the call, until the first token, and from there to the last.
Imports nothing of `bench`, as it runs with the sources of another commit.
"""

import json
import sys
import time

from coldstream import LLM, SamplingParams


def main() -> None:
    with LLM(**json.loads(sys.argv[1])) as llm:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            params = SamplingParams(temperature=0, max_tokens=request["new_tokens"], ignore_eos=True)
            start = time.perf_counter()
            outputs = llm.generate(request["prompts"], params)
            answer = {
                "seconds": time.perf_counter() - start,
                "first_token_s": outputs[0].statistics.time_to_first_token_s,
                "generation_s": outputs[0].statistics.generation_s,
                "tokens": [list(output.token_ids) for output in outputs],
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
