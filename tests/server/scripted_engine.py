"""An engine process that computes nothing: a script, for faults that a model would not show on demand.

Everything but the engine is the product's: messages, connection, loop. Its answers repeat the prompt. What is
special is asked for by the first token of a prompt, or by the first argument, the file of a script of starts:
one word a line, taken in turn by each process that starts; the last one stays.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from coldstream.engine.engine_statistics import EngineStatistics, LiveState
from coldstream.engine.events import Delta, Event, Started
from coldstream.engine.request import Piece, Statistics
from coldstream.engine.submission import Submission
from coldstream.errors import GenerationFault, InvalidRequestError, OutOfMemoryError
from coldstream.experts.gpu_statistics import ExpertTimes
from coldstream.gguf.reader import GGUFFile
from coldstream.kvcache import CacheSize, PrefixStatistics
from coldstream.server import engine_process
from coldstream.server.messages import Open
from coldstream.server.served_model import EngineFacts

DIE, GARBAGE, HANG, REFUSE, FLOOD, RAISE, WAIT = 901, 902, 903, 904, 905, 906, 907
CTX_SIZE = 4096
FLOOD_CHARS = 1 << 16


class ScriptedEngine:
    """Gives each request one token a step."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._left: dict[int, list[int]] = {}
        self._running: dict[int, Submission] = {}
        self._num_steps = 0

    @property
    def is_idle(self) -> bool:
        return not self._running

    def add(self, submission: Submission) -> None:
        if submission.request.prompt_token_ids[0] == REFUSE:
            raise InvalidRequestError("prompt: refused")
        self._running[submission.request_id] = submission
        ids = submission.request.prompt_token_ids
        self._left[submission.request_id] = [ids[i % len(ids)] for i in range(submission.request.max_tokens)]

    def cancel(self, request_id: int) -> None:
        if request_id in self._left:
            self._left[request_id] = []

    def check_file(self) -> None:
        self._file.check_unchanged()

    def rest(self) -> bool:
        return False

    def live(self) -> LiveState:
        """Steps, which take a second each; what else is counted stays at 0."""
        none = CacheSize(0, 0)
        counts: dict[str, Any] = {each.name: 0 for each in fields(EngineStatistics)}
        statistics = {"memory": none, "free_memory": none, "prefixes": PrefixStatistics()}
        times = ExpertTimes(self._num_steps, disk=float(self._num_steps))
        statistics |= {"steps": self._num_steps, "launch_s": float(self._num_steps), "expert_times": times}
        return LiveState(EngineStatistics(**(counts | statistics)), None)

    def step(self) -> list[Event]:
        self._num_steps += 1
        return [event for submission in list(self._running.values()) for event in self._advance(submission)]

    def _advance(self, submission: Submission) -> list[Event]:
        request_id, request = submission.request_id, submission.request
        kind = request.prompt_token_ids[0]
        if kind == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == RAISE:
            raise GenerationFault("the step failed")
        if kind == GARBAGE:
            os.write(int(sys.argv[2]), b"\0\0\0\5hello")
        if kind == HANG:
            signal.pause()
        left = self._left[request_id]
        if kind == WAIT and left:  # until it is cancelled
            os.sched_yield()
            return []
        if not left:
            del self._left[request_id], self._running[request_id]
            return [Delta(request_id, 0, Piece("", finish_reason="length", statistics=statistics(request)))]
        token_id = left.pop(0)
        text = "x" * FLOOD_CHARS if kind == FLOOD else f"{token_id} "
        begun = [Started(request_id, 0, len(request.prompt_token_ids))]
        is_first = len(left) == request.max_tokens - 1
        return [*(begun if is_first else []), Delta(request_id, 0, Piece(text, (token_id,)))]


def statistics(request: object) -> Statistics:
    """Counts that nobody looks at."""
    return Statistics(1, 0, 1, 0.1, 0.1, "none", 1, 0)


@contextmanager
def open_scripted(
    message: Open, progress: engine_process.OpenProgress
) -> Iterator[tuple[ScriptedEngine, EngineFacts]]:
    """Read the model's header, and do what the next line of the script says."""
    script = Path(sys.argv[1])
    lines = script.read_text().splitlines()
    script.write_text("\n".join(lines[1:] or lines))
    progress("loading", 1, 2)
    if lines[0] == "fail":
        raise OutOfMemoryError("needs 9 GiB, 1 GiB is free")
    if lines[0] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if lines[0] == "hang":
        signal.pause()
    is_due = lines[0] == "due"  # to be measured again
    if lines[0] == "wait":  # until a file beside the script is there
        while not script.with_name("go").exists():
            os.sched_yield()
    with GGUFFile.open(message.config.model) as file:
        facts = EngineFacts(
            path=str(file.paths[0]),
            fingerprint="0" * 32 if lines[0] == "other" else file.fingerprint,
            architecture="qwen35moe",
            ctx_size=message.config.ctx_size or (64 if lines[0] == "small" else CTX_SIZE),
            tier="none",
            threads=1,
            device="cpu",
            seed=None,
            spec_type="none",
            cache_type="i16",
            fast_tier="ram",
            budget_bytes=0,
            resident_experts=0,
            num_experts=0,
            prompt_cache_bytes=0,
            rates_are_due=is_due,
        )
        yield ScriptedEngine(file), facts


def main(arguments: Sequence[str]) -> int:
    return engine_process.run(arguments[2:], open_scripted)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
