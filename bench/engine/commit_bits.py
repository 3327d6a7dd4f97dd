"""The bits of this commit beside another one's: logits of prompts, and texts with their log-probabilities.

    python -m bench.engine.commit_bits --against 93970e7 --out docs/results/bits_93970e7.json

Each commit runs in an environment of its own, as in `versus_commit`. The bundled model runs on each tier of
CPU instructions that the machine has, with drafts, and on a GPU, if there is one, with all experts, without
any, and with drafts. The exit code is 1 if a digest differs. Settings that do not run here keep what the
result file has.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.engine.gpu_hybrid import budget_with
from bench.engine.versus_commit import DEMO_VRAM, Commit, gpu_name, other_commit
from bench.results import add_result_options, commit
from coldstream.assets import demo_model_path
from coldstream.kernels import _csrc
from coldstream.kernels.cuda.device import find_gpu
from coldstream.placement.hardware import Hardware
from coldstream.planning.machine import measured_hardware

WORKER: Final = Path(__file__).with_name("bits_worker.py")
CTX_SIZE: Final = 2048


@dataclass(frozen=True)
class BitsSetting:
    """How both commits open the model. tier: of CPU instructions; None: the best one."""

    name: str
    arguments: dict[str, Any]
    tier: str | None = None


def settings(model: str, device: str) -> Iterator[BitsSetting]:
    """What this machine can run on `device`."""
    common: dict[str, Any] = {"model": model, "device": device, "ctx_size": CTX_SIZE}
    if device == "cpu":
        common["threads"] = 2
        for tier in _csrc.supported_tiers():
            yield BitsSetting(f"CPU, {tier}", common, tier)
        yield BitsSetting("CPU, drafts", common | {"spec_type": "mtp"})
        return
    without = budget_with(Path(model), measured_hardware(find_gpu()), CTX_SIZE, 1, 0)
    yield BitsSetting("GPU, all experts", common | {"vram": DEMO_VRAM})
    yield BitsSetting("GPU, no experts", common | {"vram": without})
    yield BitsSetting("GPU, drafts", common | {"vram": DEMO_VRAM, "spec_type": "mtp"})


def digests_of(of: Commit, setting: BitsSetting, folder: Path) -> dict[str, str]:
    """folder: where the commit runs, so that no module of this checkout is found first."""
    words = [str(of.python), str(WORKER), json.dumps(setting.arguments)]
    words += [] if setting.tier is None else [setting.tier]
    printed = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=folder, check=True).stdout
    found: dict[str, str] = json.loads(printed.splitlines()[-1])
    return found


def compared(new: dict[str, str], old: dict[str, str]) -> dict[str, Any]:
    """How many digests there are, and the names of those that differ."""
    names = sorted(new.keys() | old.keys())
    return {"digests": len(names), "different": [name for name in names if new.get(name) != old.get(name)]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--old", type=Path, help="a checkout of that commit, with its extension")
    add_result_options(parser)
    options = parser.parse_args()
    name = options.commit or commit()
    words = ("python", "-m", "bench.engine.commit_bits", "--against", options.against)
    stamp = {"commit": name, "date": datetime.now(UTC).date().isoformat(), "command": shlex.join(words)}
    known = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    result = {"against": options.against, "settings": known.get("settings", {})}
    num_different = 0
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        new, old = Commit(name, Path(sys.executable)), other_commit(options, folder)
        machine = asdict(Hardware.measure()) | {"gpu": gpu_name()}
        for device in ("cpu", "cuda") if gpu_name() else ("cpu",):
            for setting in settings(str(demo_model_path()), device):
                found = compared(*(digests_of(each, setting, folder) for each in (new, old)))
                num_different += len(found["different"])
                print(f"{setting.name:<20} {found['digests']} digests, different: {found['different']}")
                result["settings"][setting.name] = found | stamp | {"machine": machine}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
