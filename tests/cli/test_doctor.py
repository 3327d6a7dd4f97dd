"""`coldstream doctor`: what it prints of made-up facts, and the real command in good and bad surroundings."""

import json
import os
import pwd
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldstream.cli.doctor import document, finding_lines, summary
from coldstream.cli.tables import pair_lines
from coldstream.planning.diagnosis import Finding, find
from coldstream.planning.diagnosis.machine_facts import RefusedLock
from coldstream.planning.machine import measured_hardware
from fake_driver import build_driver
from machine_facts import GIB, NO_GPU, SOUND

SECRETS = {"HF_TOKEN": "hf_secret", "COLDSTREAM_API_KEY": "sk-secret", "USER": "ann", "LOGNAME": "ann"}
SOUND_LINES = """\
coldstream        0.1.0, Python 3.12.3
system            Linux 6.8.0 x86_64
CPU               Example CPU: 8 cores of 16 CPUs, 16 in the machine
kernels           avx2 (also generic)
RAM               64.00 GiB, 60.00 GiB available
GPU 0             Example GPU, 8.00 GiB, compute capability 8.9
driver            590.1, CUDA 13.1
NVRTC             13.0
libraries         numpy 2.4.1, fastapi 0.200
extra cuda        cuda-bindings 13.1.0
locked memory     no limit
container memory  no limit
container CPUs    no limit
address space     no limit
threads           30000 more
open files        1024
huge pages        madvise
rates             ~/.cache/coldstream, writable, 100.00 GiB free
compiled kernels  ~/.cache/coldstream/cuda, writable, 100.00 GiB free
memory counts     ~/.cache/coldstream/counts, writable, 100.00 GiB free
drafters          ~/.cache/coldstream/drafters, not made yet, writable, 100.00 GiB free
models            /data/hub, writable, 100.00 GiB free
measured          2026-01-02 03:04 UTC, 7 days ago"""


def doctor(
    home: Path, *arguments: str, limit: Callable[[], None] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command in a home directory of its own, with secrets in its environment."""
    return subprocess.run(
        [sys.executable, "-m", "coldstream", "doctor", *arguments],
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": str(home), **SECRETS, **environment},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )


def findings(home: Path, **options: Any) -> dict[str, dict[str, Any]]:
    done = doctor(home, "--json", **options)
    assert done.stderr == ""
    found = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    codes = [each["exit_code"] for each in found.values() if each["exit_code"]]
    assert done.returncode == (codes[0] if codes else 0)
    return found


def test_a_sound_machine_in_lines() -> None:
    assert pair_lines(summary(SOUND), None) == SOUND_LINES.splitlines()
    assert finding_lines((), None) == ["nothing to mend"]


def test_a_refused_lock_in_a_line() -> None:
    refused = RefusedLock("2026-01-02 03:04 UTC", 7, 20 * GIB, 8 * GIB)
    line = summary(replace(SOUND, refused_lock=refused))["locked memory"]
    assert line == "no limit; a GPU got 8.00 GiB of 20.00 GiB at 2026-01-02 03:04 UTC, 7 days ago"


def test_what_is_missing_in_lines() -> None:
    poor = replace(
        SOUND,
        gpu=NO_GPU,
        limits=replace(SOUND.limits, wsl=2, in_container=True, locked_bytes=8 << 20, cgroup_cpus=2.5),
        libraries=(replace(SOUND.libraries[0], version=None),),
        folders=(replace(SOUND.folders[0], path=None), replace(SOUND.folders[1], is_writable=False)),
        rates=replace(SOUND.rates, state="of another machine", measured=()),
    )
    lines = summary(poor)
    assert lines["system"] == "Linux 6.8.0 x86_64, WSL 2, in a container"
    assert (lines["GPU"], lines["driver"]) == ("none", "none")
    assert lines["libraries"] == "numpy missing"
    assert (lines["locked memory"], lines["container CPUs"]) == ("8.00 MiB", "2.5")
    assert (lines["rates"], lines["measured"]) == ("nowhere", "of another machine")
    assert "cuda, not writable, 100" in lines["compiled kernels"]


def test_a_finding_is_a_line_with_its_level() -> None:
    small = replace(SOUND, limits=replace(SOUND.limits, wsl=2, threads_left=1))
    error, advice = finding_lines(find(small), None)
    assert error.startswith("error: 1 further threads may be started")
    assert advice.startswith("faster: Windows gives WSL 64.0 GiB of RAM")
    assert max(map(len, finding_lines(find(small), 60))) <= 60


def test_a_finding_does_not_control_the_terminal() -> None:
    finding = Finding("x", "error", "the folder \x1b[2J is full", "`rm a\x1b[31m`")
    assert finding_lines((finding,), None) == ["error: the folder \\x1b[2J is full: `rm a\\x1b[31m`"]


def test_text_of_others_does_not_control_the_terminal(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    hostile = replace(SOUND, cpu=replace(SOUND.cpu, name="a\x1b[2J CPU", tiers=("generic",)))
    monkeypatch.setattr("coldstream.planning.diagnosis.gather_facts", lambda version: hostile)
    code, out, error = run("doctor")
    assert (code, error) == (0, "")
    assert "a\\x1b[2J CPU" in out
    assert "\x1b" not in out


def test_json_has_all_facts_and_findings_with_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    small = replace(SOUND, limits=replace(SOUND.limits, threads_left=1))
    monkeypatch.setattr("coldstream.planning.diagnosis.gather_facts", lambda version: small)
    code, out, _ = run("doctor", "--json")
    assert code == 71
    assert out.count("\n") == 1
    assert json.loads(out) == json.loads(json.dumps(document(small, find(small))))
    assert [each["name"] for each in json.loads(out)["findings"]] == ["threads"]


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_this_machine_has_no_secrets_in_it_and_is_left_as_it_was(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    home, user = tmp_path / "ann", pwd.getpwuid(os.getuid()).pw_name
    home.mkdir()
    done = doctor(home, *arguments, HF_HUB_CACHE=str(tmp_path / user / "hub"))
    assert done.stderr == ""
    assert "~/.cache/coldstream" in done.stdout
    assert "/USER/hub" in done.stdout
    for secret in (str(home), os.path.expanduser("~") + "/", f"/{user}/", "hf_secret", "sk-secret", "/ann"):
        assert secret not in done.stdout
    assert not list(home.iterdir())


@pytest.mark.sharded(of="processes")
def test_rates_of_another_machine_and_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / ".cache" / "coldstream" / "hardware.json"
    assert "rates-unusable" not in findings(tmp_path)
    measured_hardware(None, path=path)
    assert "rates-unusable" not in findings(tmp_path)
    document = json.loads(path.read_text())
    document["cpu"]["machine"]["cpu"] = "another CPU"
    path.write_text(json.dumps(document))
    assert "of another machine" in findings(tmp_path)["rates-unusable"]["text"]
    path.write_text("{")
    assert "damaged" in findings(tmp_path)["rates-unusable"]["text"]
    path.unlink()
    path.mkdir()
    assert findings(tmp_path)["rates-not-kept"]["mend"] == "`rm -r ~/.cache/coldstream/hardware.json`"


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    found = findings(Path("/proc/self"), HF_HUB_CACHE=str(tmp_path))
    assert found["folder-read-only"]["level"] == "warning"
    assert "~/.cache/coldstream" in found["folder-read-only"]["text"]


@pytest.mark.sharded
@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"CUDA_VERSION": 12080}, "driver-old"),
        ({"MAJOR": 6}, "card-old"),
        ({"NUM_DEVICES": 0}, "driver-shows-none"),
    ],
)
def test_drivers_that_cannot_be_used(tmp_path: Path, values: dict[str, int], name: str) -> None:
    assert name in findings(tmp_path, LD_LIBRARY_PATH=str(build_driver(tmp_path, **values)))


@pytest.mark.sharded(of="processes")
def test_a_gpu_without_packages_and_a_forged_kernel(tmp_path: Path) -> None:
    forged = tmp_path / ".cache" / "coldstream" / "cuda"
    forged.mkdir(mode=0o700, parents=True)
    forged.parent.chmod(0o700)
    (forged / "forged.cubin").write_bytes(b"code")
    without = str(Path(__file__).parents[1] / "no_pytorch")
    library = str(build_driver(tmp_path))
    found = findings(tmp_path, LD_LIBRARY_PATH=library, PYTHONPATH=os.pathsep.join([without, *sys.path]))
    assert "cuda-bindings" in found["gpu-packages"]["text"]
    assert found["folder-damaged"]["text"].endswith("1 of the files in ~/.cache/coldstream/cuda")


@pytest.mark.sharded(of="processes")
def test_limits_of_the_process_are_found(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        resource.setrlimit(resource.RLIMIT_AS, (8 * GIB, 8 * GIB))

    found = findings(tmp_path, limit=limit)
    assert "100 files" in found["open-files"]["text"]
    assert "8.0 GiB" in found["address-space"]["text"]


@pytest.mark.sharded(of="processes")
def test_no_library_of_a_gpu_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom coldstream.cli.main import main\nmain(['doctor', '--json'])\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "False\n"
