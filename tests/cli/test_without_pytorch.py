"""Every verb, and the Python interface, where PyTorch and CUDA's packages are not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from terminals import Terminal

from builders import write_gguf
from coldstream.placement.hardware_file import default_path
from coldstream.planning.machine import measured_hardware
from dflash_cases import ALL_SLIDING, config, random_tensors, spec_of, write_gguf_drafter
from fake_driver import build_driver
from short_rates import PROGRAM

TESTS = Path(__file__).parents[1]
INSTALL = "pip install 'coldstream[cuda]'"
ON_CPU = ("--device", "cpu")
SHORT = ("-n", "4", "-c", "64", "--temp", "0")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a process that finds none of those packages, with a home directory of its own."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        measured_hardware(None, path=default_path())
    paths = [str(TESTS / "no_pytorch"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    settings = {"HOME": str(home), "HF_HOME": str(home / "hub"), "COLUMNS": "100"}
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="module")
def gpu_environment(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same, with a driver that shows a GPU."""
    return {**environment, "LD_LIBRARY_PATH": str(build_driver(tmp_path_factory.mktemp("driver")))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    (path,) = write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", types={"*_exps.weight": "Q4_K"})
    return str(path)


def call(
    environment: dict[str, str], *arguments: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this Python with these arguments."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def coldstream(
    environment: dict[str, str], *arguments: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line, which must succeed. Only `bench` measures whatever is kept in the home."""
    program = PROGRAM if arguments[0] == "bench" else ("-m", "coldstream")
    done = call(environment, *program, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.sharded(of="processes")
def test_a_drafter_in_a_gguf_file_drafts(environment: dict[str, str], model: str, tmp_path: Path) -> None:
    values = config(True, **ALL_SLIDING, is_causal=True, hidden_size=256, vocab_size=320, num_target_layers=4)
    values["dflash_config"] |= {"target_layer_ids": [0, 3], "mask_token_id": 319}
    spec = spec_of(values)
    path = write_gguf_drafter(tmp_path / "drafter.gguf", spec, random_tensors(spec))
    arguments = ("run", model, "-p", "def", "-n", "24", "--seed", "1", "--ignore-eos", *ON_CPU)
    drafting = coldstream(environment, *arguments, "--model-draft", str(path), "--tree-budget", "3")
    assert "tokens a step by dflash" in drafting.stderr
    assert drafting.stdout == coldstream(environment, *arguments).stdout


def test_the_packages_are_out_of_reach(environment: dict[str, str]) -> None:
    for name in ("torch", "cuda.bindings.driver"):
        assert "ModuleNotFoundError" in call(environment, "-c", f"import {name}").stderr


@pytest.mark.sharded
@pytest.mark.parametrize(
    "options",
    [(), ("--cache-type-k", "i4", "--cache-type-v", "i4"), ("--ram", "30M"), ("--tier", "generic")],
)
def test_run(environment: dict[str, str], options: tuple[str, ...]) -> None:
    done = coldstream(environment, "run", "-p", "def read(", "-q", *SHORT, *ON_CPU, *options)
    assert done.stdout.strip()
    assert done.stderr == ""


@pytest.mark.sharded(of="processes")
def test_a_chat(environment: dict[str, str], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "PYTHONPATH"):
        monkeypatch.setenv(name, environment[name])
    command = [sys.executable, "-m", "coldstream", "run", model, "-n", "4", "-c", "256", *ON_CPU]
    with Terminal(command, environment["HOME"]) as terminal:
        start = terminal.read_until(">>>")
        terminal.type("def\r")
        start = terminal.read_until("generated 4 tokens", start)
        terminal.read_until(">>>", start)
        terminal.type("\x04")
        assert terminal.wait() == 0


@pytest.mark.sharded(of="processes")
def test_bench(environment: dict[str, str]) -> None:
    arguments = ("bench", "-p", "8", "-n", "2", "-r", "1", *ON_CPU)
    assert {"pp8", "tg2"} <= set(coldstream(environment, *arguments).stdout.split())


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("budget", [ON_CPU, (*ON_CPU, "--ram", "30M"), ("--vram", "600M")])
def test_plan(environment: dict[str, str], budget: tuple[str, ...]) -> None:
    done = coldstream(environment, "plan", "-c", "1000", "--json", *budget)
    plan = json.loads(done.stdout)["plan"]
    assert plan["tier"] == ("vram" if "--vram" in budget else "ram")
    assert ("activations are estimated" in done.stderr) == ("--vram" in budget)


@pytest.mark.sharded(of="processes")
def test_profile_show_and_ls(environment: dict[str, str], model: str, tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text("import os\n" * 20)
    arguments = ("profile", model, "--text", "text.py", "--out", "trace.routing", "--plot", "trace.svg")
    assert "experts used" in coldstream(environment, *arguments, cwd=tmp_path).stdout
    assert "qwen35moe" in coldstream(environment, "show", model).stdout
    assert json.loads(coldstream(environment, "ls", "--json").stdout) == []


@pytest.mark.sharded(of="processes")
def test_pull(environment: dict[str, str], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TESTS / "gguf")
    from hub_server import REPO, HubServer

    with HubServer({"tiny-Q4_K_M.gguf": Path(model).read_bytes()}) as hub:
        done = coldstream({**environment, "HF_ENDPOINT": hub.endpoint}, "pull", REPO)
    assert "tiny-Q4_K_M.gguf" in done.stdout


@pytest.mark.sharded(of="processes")
def test_the_python_interface(environment: dict[str, str], model: str) -> None:
    script = """
import sys
from coldstream import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=4)
with LLM(sys.argv[1], device="cpu", ctx_size=256) as llm:
    assert llm.generate("def", params)[0].token_ids
    assert list(llm.stream("def", params))
    assert llm.chat([{"role": "user", "content": "def"}], params)[0].token_ids
    assert llm.logits([1, 2, 3]).shape[0] == 3
print(*sys.modules)
"""
    done = call(environment, "-c", script, model)
    assert done.returncode == 0, done.stderr
    assert "coldstream.models.cpu.runner" in done.stdout.split()
    assert "coldstream.models.cuda.runner" not in done.stdout.split()


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("arguments", [("run", "-p", "a"), ("bench",), ("plan",)])
def test_a_gpu_that_is_asked_for_says_what_to_install(
    environment: dict[str, str], gpu_environment: dict[str, str], arguments: tuple[str, ...]
) -> None:
    for place in (environment, gpu_environment):
        done = call(place, "-m", "coldstream", *arguments, "--device", "cuda")
        assert done.returncode == 72
        assert "error: device cuda: packages are missing (cuda-core, cuda-bindings)" in done.stderr
        assert INSTALL in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.sharded(of="processes")
def test_so_does_a_budget_of_a_gpus_memory(gpu_environment: dict[str, str]) -> None:
    done = call(gpu_environment, "-m", "coldstream", "run", "-p", "a", "--vram", "1G")
    assert (done.returncode, done.stdout) == (72, "")
    assert INSTALL in done.stderr
    script = "from coldstream import LLM; LLM('none.gguf', vram='1G')"
    assert "coldstream.errors.DeviceError" in call(gpu_environment, "-c", script).stderr


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize(
    "arguments", [("run", "-p", "def", *SHORT), ("bench", "-p", "8", "-n", "0", "-r", "1")]
)
def test_a_gpu_that_is_not_used_is_named_once(
    gpu_environment: dict[str, str], arguments: tuple[str, ...]
) -> None:
    done = coldstream(gpu_environment, *arguments)
    assert done.stderr.count("there is a GPU, but the CPU computes") == done.stderr.count(INSTALL) == 1
    assert "there is a GPU" not in coldstream(gpu_environment, *arguments, *ON_CPU).stderr


@pytest.mark.sharded(of="processes")
def test_python_warns_of_it(gpu_environment: dict[str, str], model: str) -> None:
    script = "import sys; from coldstream import LLM; LLM(sys.argv[1], ctx_size=64).close()"
    done = call(gpu_environment, "-c", script, model)
    assert done.returncode == 0, done.stderr
    assert "<string>:1: UserWarning: there is a GPU, but the CPU computes" in done.stderr


@pytest.mark.sharded(of="processes")
def test_a_plan_for_a_gpu_that_needs_packages(gpu_environment: dict[str, str]) -> None:
    done = coldstream(gpu_environment, "plan", "-c", "1000", "--vram", "600M")
    assert "the GPU is not measured" in done.stderr
    assert INSTALL in done.stderr
    done = coldstream(gpu_environment, "plan", "-c", "1000")
    assert INSTALL in done.stderr, "the CPU is planned for"
