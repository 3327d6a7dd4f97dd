"""What is compared between two commits: the lines, and the settings under which each runs."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from zlib import crc32

GIB: Final = 2**30
FIRST_ID, STEP = 1000, 257  # of prompts for full-size files, whose text walks through the vocabulary
SMALL_IDS: Final = 200  # of prompts for others


@dataclass(frozen=True)
class Setting:
    """How a model is opened, by both commits alike.

    model: demo, small (four layers of the full-size shape) or full. expert_gib: on the GPU; None: all.
    """

    name: str
    model: Literal["demo", "small", "full"]
    device: Literal["cpu", "cuda"]
    ctx_size: int
    expert_gib: float | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def arguments(self, path: str, threads: int, vram: int | None) -> dict[str, Any]:
        """Keyword arguments of `LLM`."""
        chosen: dict[str, Any] = {"model": path, "device": self.device, "ctx_size": self.ctx_size}
        chosen |= {"threads": threads} if self.device == "cpu" else {"vram": vram}
        return chosen | dict(self.options)


@dataclass(frozen=True)
class Line:
    """A figure in tokens a second: `prompts` of `prompt_tokens` each, and `new_tokens` behind each.

    counted: the prompt until its first token, one text's tokens behind the first, or all new tokens in the
    time of the whole call. With `part`, all runs take the next tokens of one text, whose prompt is computed
    once; it is for prompts that take far longer than their tokens.
    """

    name: str
    setting: Setting
    counted: Literal["prompt", "text", "all", "part"]
    prompts: int = 1
    prompt_tokens: int = 16
    new_tokens: int = 128

    def request(self, run: int) -> dict[str, Any]:
        """Prompts that no run of any line had, so that no prefix is found again; of parts, the one prompt."""
        if self.counted == "part":
            longest = self.setting.ctx_size - self.prompt_tokens
            return {"prompt": self._prompt(0, 0), "longest": longest, "new_tokens": self.new_tokens}
        return {"prompts": [self._prompt(run, i) for i in range(self.prompts)], "new_tokens": self.new_tokens}

    def _prompt(self, run: int, number: int) -> list[int]:
        if self.setting.model == "full":
            first = FIRST_ID + STEP * (run * self.prompts + number) + crc32(self.name.encode()) % STEP
            return list(range(first, first + self.prompt_tokens))
        chooser = random.Random(f"{self.name} {run} {number}")
        return [chooser.randrange(SMALL_IDS) for _ in range(self.prompt_tokens)]

    def rate(self, answer: Mapping[str, Any]) -> float:
        """Tokens a second."""
        if self.counted == "prompt":
            return self.prompt_tokens / float(answer["first_token_s"])
        if self.counted == "text":
            return (self.new_tokens - 1) / float(answer["generation_s"])
        return self.prompts * self.new_tokens / float(answer["seconds"])


@dataclass(frozen=True)
class ServerLine:
    """Tokens a second of a server, asked by so many clients one request after the other for `seconds`."""

    name: str
    setting: Setting
    clients: int
    seconds: float


DEMO_CPU = Setting("demo on the CPU", "demo", "cpu", 4096)
SMALL_CPU = Setting("four layers on the CPU", "small", "cpu", 4096)
SMALL_CPU_DEEP = Setting("four layers on the CPU, a context of 32K", "small", "cpu", 32_768 + 1024)
RESIDENT = Setting("all experts on the GPU", "full", "cuda", 9216, options=(("parallel", 32),))
DEEP = Setting("a context of 131K", "full", "cuda", 131_072 + 2048)
DRAFTS = Setting("drafts of the model's own block", "demo", "cuda", 4096, options=(("spec_type", "mtp"),))
PARTLY = [Setting(f"{gib:g} GiB of experts", "full", "cuda", 4096, expert_gib=gib) for gib in (0, 3, 10.67)]

LINES: Final[tuple[Line | ServerLine, ...]] = (
    Line("cpu-demo-decode", DEMO_CPU, "text", new_tokens=512),
    Line("cpu-demo-prompt", DEMO_CPU, "prompt", prompt_tokens=512, new_tokens=1),
    Line("cpu-4-layers-decode", SMALL_CPU, "text"),
    Line("cpu-4-layers-prompt", SMALL_CPU, "prompt", prompt_tokens=512, new_tokens=1),
    Line("cpu-4-layers-32k", SMALL_CPU_DEEP, "part", prompt_tokens=32_768, new_tokens=16),
    ServerLine("cpu-server-load", DEMO_CPU, clients=8, seconds=10.0),
    Line("gpu-1-row", RESIDENT, "text", new_tokens=256),
    Line("gpu-8-rows", RESIDENT, "all", prompts=8, prompt_tokens=64),
    Line("gpu-32-rows", RESIDENT, "all", prompts=32, prompt_tokens=64),
    Line("gpu-prompt-512", RESIDENT, "prompt", prompt_tokens=512, new_tokens=1),
    Line("gpu-prompt-8192", RESIDENT, "prompt", prompt_tokens=8192, new_tokens=1),
    *(
        Line(f"gpu-experts-{setting.expert_gib:g}-gib", setting, "text", prompt_tokens=168, new_tokens=192)
        for setting in PARTLY
    ),
    Line("gpu-131k", DEEP, "part", prompt_tokens=131_072, new_tokens=64),
    Line("gpu-mtp", DRAFTS, "text", new_tokens=256),
)
