"""A wheel as a user meets it: an empty environment, no compiler to be found, one text and one chat.

Needs nothing but Python, whose `venv` makes the environment. Nothing of the caller's settings is passed on.
"""

import ctypes
import json
import platform
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PROMPT = "def read_lines(path):"
RUN = ("run", "-p", PROMPT, "-n", "16", "--temp", "0", "-q", "--no-echo")
SERVE = ("serve", "--port", "0", "--log-format", "json")
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16, "temperature": 0}
START_S = 120.0
# What the kernel says of a CPU that can run a tier, by the names of /proc/cpuinfo.
AVX2 = {"avx2", "fma", "f16c", "bmi2"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512vbmi"}
TIERS = {
    "avx2": AVX2,
    "avx_vnni": AVX2 | {"avx_vnni"},
    "avx512": AVX512,
    "neon": {"asimd"},
    "dotprod": {"asimddp"},
}
AT_HWCAP = 16  # of <sys/auxv.h>
HWCAPS = {1: "asimd", 20: "asimddp"}  # of <asm/hwcap.h>, by the number of the bit


def cpu_flags() -> set[str]:
    """Words that name what this CPU can do, among others.

    On aarch64 by the list that the kernel gives each process. An emulated CPU has its own, and /proc/cpuinfo
    is that of the machine below.
    """
    if platform.machine() != "aarch64":
        return set(Path("/proc/cpuinfo").read_text().split())
    libc = ctypes.CDLL(None)
    libc.getauxval.argtypes, libc.getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    bits = libc.getauxval(AT_HWCAP)
    return {name for bit, name in HWCAPS.items() if bits >> bit & 1}


class UserEnvironment:
    """An empty environment of a Python in `folder`, with a home directory of its own.

    Its PATH has the environment's programs alone: no compiler, and no other tool of the system.
    """

    def __init__(self, python: str, folder: Path) -> None:
        folder.mkdir()
        self.venv = folder / "venv"
        self.variables = {"PATH": str(self.venv / "bin"), "HOME": str(folder)}
        self._folder = folder
        subprocess.run([python, "-m", "venv", str(self.venv)], check=True)

    def command(self, *arguments: str) -> list[str]:
        return [str(self.venv / "bin" / "python"), "-m", *arguments]

    def missing_tier(self) -> str | None:
        """A tier that the CPU can run and the installed extension does not find; None if there is none."""
        script = "from coldstream.kernels import _csrc; print(*_csrc.supported_tiers())"
        command = [self.command()[0], "-c", script]
        done = subprocess.run(command, env=self.variables, check=True, stdout=subprocess.PIPE, text=True)
        flags = cpu_flags()
        expected = (tier for tier, wanted in TIERS.items() if wanted <= flags)
        return next((tier for tier in expected if tier not in done.stdout.split()), None)

    def install(self, wheel: Path) -> None:
        """With its dependencies from wheels alone. Raises CalledProcessError."""
        options = ("--disable-pip-version-check", "install", "-q", "--only-binary=:all:")
        self.output("pip", *options, str(wheel))

    def output(self, *arguments: str) -> str:
        """What `python -m` with these arguments prints, away from any checkout. Raises CalledProcessError."""
        command = self.command(*arguments)
        done = subprocess.run(
            command, cwd=self._folder, env=self.variables, check=True, stdout=subprocess.PIPE, text=True
        )
        return done.stdout

    def generate(self) -> str:
        """A text by the bundled model."""
        return self.output("coldstream", *RUN)

    def chat(self) -> str:
        """An answer of a server with the bundled model, over HTTP."""
        with served(self.command("coldstream", *SERVE), self._folder / "log", self.variables) as url:
            request = urllib.request.Request(
                f"{url}/v1/chat/completions",
                json.dumps(CHAT).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=START_S) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]


@contextmanager
def served(command: list[str], log: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """The address of a server that is ready, and stopped afterwards.

    Raises RuntimeError, with the end of its log, if it is not ready within START_S seconds.
    """
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, cwd=log.parent, env=variables, stdout=subprocess.DEVNULL, stderr=stderr
        )
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r'"url": ?"([^"]+)"', log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not become ready: {log.read_text()[-500:]}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait(START_S)


def try_wheel(python: str, wheel: Path, folder: Path) -> dict[str, float]:
    """Install a wheel, generate and chat; the seconds that each took.

    Raises CalledProcessError where a command fails, and RuntimeError where nothing is generated.
    """
    user = UserEnvironment(python, folder)
    start = time.perf_counter()
    user.install(wheel)
    installed = time.perf_counter()
    missing = user.missing_tier()
    if missing:
        raise RuntimeError(f"{wheel.name} does not find the {missing} of this CPU")
    started = time.perf_counter()
    text = user.generate()
    generated = time.perf_counter()
    answer = user.chat()
    if not text.strip() or not answer.strip():
        raise RuntimeError(f"{wheel.name} generated nothing with {python}")
    return {
        "install_s": installed - start,
        "run_s": generated - started,
        "serve_and_chat_s": time.perf_counter() - generated,
    }
