"""The command as a whole: start-up cost, exit codes, broken pipes; real processes where it matters."""

import os
import re
import subprocess
import sys

import click
import pytest

from coldstream import __version__, errors
from coldstream.cli.main import VERBS, main
from coldstream.kernels.cuda import ahead

COLDSTREAM = [sys.executable, "-m", "coldstream"]

# Runs the command line and then says on standard error which of the heavy modules it has imported.
_REPORT_IMPORTS = """
import sys
from coldstream.cli.main import main
code = main(sys.argv[1:])
print(*sorted({"torch", "numpy", "rich", "jinja2", "huggingface_hub"} & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


def _imports(*arguments: str) -> set[str]:
    command = [sys.executable, "-c", _REPORT_IMPORTS, *arguments]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stderr.split())


def test_help_lists_the_verbs_and_imports_nothing_heavy() -> None:
    assert _imports("--help") == set()
    shown = subprocess.run([*COLDSTREAM, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(f"  {verb} " in shown for verb in VERBS)


@pytest.mark.sharded(9)
@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_needs_no_torch(verb: str) -> None:
    assert "torch" not in _imports(verb, "--help")


@pytest.mark.sharded(of="processes")
def test_generating_on_the_cpu_needs_no_torch() -> None:
    """Whose import takes longer than a small model's answer, and more memory than many a model."""
    assert "torch" not in _imports("run", "-p", "def", "-n", "1", "--device", "cpu", "--quiet")


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (["run", "no-such-model.gguf"], True),
        (["bench", "no-such-model.gguf", "--vram", "6G"], True),
        (["run", "no-such-model.gguf", "--device", "cpu"], False),
        (["run", "no-such-model.gguf", "--device=cpu"], False),
        (["run", "--help"], False),
        (["ls"], False),
    ],
)
def test_a_gpu_is_made_ready_beside_the_imports_of_verbs_that_compute(
    arguments: list[str], begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[None] = []
    monkeypatch.setattr(ahead, "begin", lambda: begun.append(None))
    main(arguments)
    assert bool(begun) == begins


@pytest.mark.parametrize("verb", VERBS)
def test_short_help_in_the_list_is_the_verbs_own(verb: str) -> None:
    from coldstream.cli.main import cli

    with cli.make_context("coldstream", [verb], resilient_parsing=True) as context:
        command = cli.get_command(context, verb)
    assert command is not None
    assert command.short_help == VERBS[verb]


@pytest.mark.sharded(9)
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["frob"], 2, "no command frob: there are run, serve,"),
        (["bnech"], 2, "no command bnech: did you mean bench?"),
        (["chat"], 2, "no command chat: did you mean run?"),
        (["models/a.gguf"], 2, "did you mean coldstream run models/a.gguf?"),
        (["version"], 2, "no command version: did you mean --version?"),
        (["run", "--frobnicate"], 2, "No such option --frobnicate (see coldstream run --help)"),
        (
            ["run", "--parallel", "2"],
            2,
            "No such option --parallel: it is one of serve, plan (see coldstream",
        ),
        (["run", "--temperature", "2"], 2, "No such option --temperature: did you mean --"),
        (["ls", "--tensor-parallel"], 2, "No such option --tensor-parallel (see coldstream ls --help)"),
        (["run", "-zz"], 2, "No such option -z (see"),
        (["--no-such-option"], 2, "No such option --no-such-option (see coldstream --help)"),
        (["serve", "-np", "4"], 2, "-np: use --parallel N with"),
        (["run", "--grammar", "root ::= x"], 2, "--grammar: each request to `coldstream serve` takes one"),
        (["run", "x", "-p", "y", "--temp", "hot"], 2, "not a valid float"),
        (["run", "x", "-p", "y", "--temp", "-1"], 2, "temperature must be a number from 0"),
        (["run", "x", "-p", "y", "--ctx-size", "8q"], 2, "not a size"),
        (["run", "x", "-p", "y", "--threads", "0"], 2, "threads must be an integer from 1"),
        (["run", "x", "-p", "y", "--chat-template-kwargs", "[1]"], 2, "not a JSON object"),
        (["run", "x", "-p", "y", "-ngl", "99"], 2, "-ngl: use --vram SIZE (8G, for example)"),
        (["run", "x", "--devices", "0,1"], 2, "--devices: one GPU computes, the first that the driver shows"),
        (
            ["plan", "x", "--vram", "20G,12G"],
            2,
            "vram (--vram) is one size, of the memory of the one GPU that",
        ),
        (["bench", "x", "--n-gpu-layers", "99"], 2, "-ngl: use --vram SIZE"),
        (["run", "x", "-p", "y", "-ncmoe", "9"], 2, "-ncmoe: use --vram SIZE: the GPU holds the experts"),
        (["plan", "x", "-cmoe"], 2, "-cmoe: use --vram SIZE: the GPU holds the experts"),
        (["run", "x", "-p", "y", "-ot", "exps=CPU"], 2, "-ot: use --vram SIZE: the GPU holds the experts"),
        (["run", "x", "-fa", "on"], 2, "-fa: attention never stores its scores"),
        (["run", "x", "--jinja"], 2, "--jinja: chat templates"),
        (["run", "-m", "x"], 2, "the model is the first argument"),
        (["run", "x", "write a poem"], 2, "did you mean -p 'write a poem'?"),
        (["run", "x", "write", "it's"], 2, """did you mean -p 'write it'"'"'s'?"""),
        (["run", "write a poem"], 2, "did you mean -p 'write a poem'?"),
        (["run", "-p", "y", "-n", "0"], 2, "'0' is not a number of tokens: give one from 1 to"),
        (["run", "-p", "y", "-n", "-2"], 2, "or -1 for all that the context has room for"),
        (["run", "/nonexistent/model.gguf", "-p", "y"], 66, "no such file"),
        (["show", "/nonexistent/model.gguf"], 66, "no such file"),
        (["show", "/dev/null"], 65, "not a regular file"),
        (["pull", "not a name"], 66, "is written org/repo"),
        (
            ["convert-drafter", "/dev/null", "x.gguf"],
            66,
            "/dev/null is no folder: name the one with config.json",
        ),
        (["convert-drafter", "/dev", "x.gguf"], 66, "/dev/config.json: No such file or directory"),
        (
            ["convert-drafter", "/dev", "/dev/absent/x.gguf"],
            2,
            "give a file in a folder that exists with FILE",
        ),
        (["bench", "x", "-p", "0", "-n", "0"], 2, "nothing to measure"),
        (["bench", "x", "-p", "1,,2"], 2, "not a list"),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(arguments: list[str], code: int, message: str) -> None:
    done = subprocess.run([*COLDSTREAM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_verb_the_first_steps_are_shown() -> None:
    done = subprocess.run(COLDSTREAM, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"coldstream {__version__} runs Mixture-of-Experts")
    verbs = re.findall(r"^  coldstream (\S+)", done.stdout, re.MULTILINE)
    assert {"run", "plan", "--help"} <= set(verbs)
    assert set(verbs) <= {*VERBS, "--help"}
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_verbose_adds_the_traceback() -> None:
    arguments = ["show", "/nonexistent/model.gguf", "--verbose"]
    done = subprocess.run([*COLDSTREAM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 66
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


# Where the idea is llama.cpp's, so is the name.
_NAMES = {
    "run": "--prompt -p --file -f --system-prompt -sys --n-predict -n --ctx-size -c --threads -t --temp "
    "--top-k --top-p --min-p --repeat-penalty --repeat-last-n --presence-penalty --frequency-penalty "
    "--seed -s --ignore-eos --cache-type-k -ctk --cache-type-v -ctv --offline --chat-template-kwargs",
    "serve": "--host --port --api-key --api-key-file --alias --parallel --ctx-size -c --threads -t --vram "
    "--ram --model-draft --offline",
    "bench": "--n-prompt -p --n-gen -n --n-depth -d --repetitions -r --threads -t --ctx-size -c",
    "plan": "--ctx-size -c --threads -t --vram --ram --pin-layers --out",
    "profile": "--ctx-size -c --threads -t --text --plot",
    "show": "--tensors --json --offline",
    "pull": "--verbose",
    "ls": "--json",
    "convert-drafter": "--verbose",
    "doctor": "--json",
    "verify": "--json --report --vram --ram --threads -t --model-draft --offline",
    "completion": "--verbose",
    "help": "--verbose",
}


@pytest.mark.sharded(9)
@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_explained_under_its_usual_name(verb: str) -> None:
    from coldstream.cli.main import cli

    with cli.make_context("coldstream", [verb], resilient_parsing=True) as context:
        command = cli.get_command(context, verb)
    assert command is not None
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    assert {name for option in options for name in option.opts} >= set(_NAMES[verb].split())
    for option in options:
        assert option.help, option.name
        assert option.help.endswith("."), option.name
    done = subprocess.run([*COLDSTREAM, verb, "--help"], capture_output=True, text=True, check=True)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "INTEGER RANGE" not in done.stdout


def test_version() -> None:
    done = subprocess.run([*COLDSTREAM, "--version"], capture_output=True, text=True, check=True)
    assert __version__ in done.stdout


@pytest.mark.sharded(of="processes")
def test_a_gpu_that_is_not_there_is_an_error_before_anything_else() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    arguments = ["run", "/nonexistent/model.gguf", "-p", "y", "--device", "cuda"]
    done = subprocess.run([*COLDSTREAM, *arguments], capture_output=True, text=True, check=False, env=hidden)
    assert done.returncode == 72
    assert done.stderr.startswith("error: device cuda: no GPU to use")
    assert done.stderr.count("\n") == 1


def test_a_full_device_is_an_error_and_no_traceback() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COLDSTREAM, "ls", "--json"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_characters_that_the_output_does_not_know_are_escaped() -> None:
    code = "import sys; from coldstream.cli import ls, main as m\n"
    code += "ls.command.callback = lambda as_json: print('汉'); sys.exit(m.main(['ls']))"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert done.stdout == b"\\u6c49\n"


def test_every_error_class_has_its_documented_exit_code() -> None:
    tree = re.findall(r"(\w+(?:Error|Fault)) +(\d+)\b", errors.__doc__ or "")
    assert len(tree) >= 8
    for name, code in tree:
        assert getattr(errors, name).exit_code == int(code), name
