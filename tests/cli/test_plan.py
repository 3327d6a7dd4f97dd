"""`coldstream plan` on tiny models, on a machine whose rates were stored."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from builders import Dims, make_model, write_gguf, write_model
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.device import gpu_is_visible
from coldstream.placement.hardware_file import default_path
from coldstream.placement.run_file import LastRun, described, keep_run, runs_path
from coldstream.planning.machine import measured_hardware

Run = Callable[..., tuple[int, str, str]]

no_gpu = pytest.mark.skipif(gpu_is_visible(), reason="what a machine without a GPU shows")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory with the rates of this machine."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        measured_hardware(None, path=default_path())
    return home


@pytest.fixture
def model(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text("import os\nprint(os.getcwd())\n" * 40)
    types = {"blk.0.ffn_down_exps.weight": "Q8_0", "*_exps.weight": "Q4_K"}
    return write_gguf(tmp_path / "tiny.gguf", types=dict(reversed(types.items())))[0]


def as_json(run: Run, *arguments: str) -> dict[str, Any]:
    code, shown, error = run("plan", *arguments, "--json")
    assert (code, error) == (0, "")
    assert shown.count("\n") == 1
    document: dict[str, Any] = json.loads(shown)
    return document


def least(run: Run, model: Path, *arguments: str) -> int:
    """The minimum that a refusal names, in bytes, and a little for its rounding."""
    _, _, error = run("plan", str(model), *arguments, "0")
    match = re.search(r"minimum of ([\d.]+) MiB", error)
    assert match, error
    return int(float(match[1]) * 2**20) + 2**13


def in_ram(run: Run, model: Path) -> tuple[str, ...]:
    """Arguments for a plan with about half of the experts in RAM."""
    arguments = ("--device", "cpu", "-c", "100", "--ram")
    return (*arguments, str(least(run, model, *arguments) + 2 * 2**20))


def test_an_attention_window_is_part_of_the_plan(run: Run, model: Path) -> None:
    arguments = (str(model), "--device", "cpu", "-c", "100", "--attention-window", "7")
    assert as_json(run, *arguments)["plan"]["attention_window"] == 7
    shown = run("plan", *arguments, "--out", "my.plan")[1]
    assert re.search(r"keys, values, states of 100 tokens, i16, attending to 7 +RAM ", shown)
    code, _, error = run("bench", str(model), "--plan", "my.plan", "--attention-window", "9")
    assert code == 2
    assert "attention_window (--attention-window) is part of the plan" in error


@pytest.mark.sharded(of="processes")
def test_a_plan_for_ram(run: Run, model: Path) -> None:
    code, shown, error = run("plan", str(model), *in_ram(run, model))
    assert code == 0
    for row in (
        r"keys, values, states of 100 tokens, i16 +RAM +0\.\d+ MiB",
        r"\d+ experts of 0\.12 MiB +RAM ",
        r"\d+ of 32 experts +disk +\d\.\d\d MiB",
        r"hit rate +\d+\.\d% +100\.0%",
        r"decode, tok/s +[\d.]+ +[\d.]+ +[\d.]+",
    ):
        assert re.search(row, shown), row
    assert "prefill of 168" not in shown  # which does not fit the context
    assert "hit rates: published" in error


@no_gpu
def test_ngrams_in_use_are_a_row_of_ram(run: Run, model: Path, tmp_path: Path) -> None:
    """On a CPU within the budget, and beside a GPU besides."""
    for name, ngrams in (("without", False), ("with", True)):
        write_model(tmp_path / f"{name}.gguf", make_model("qwen4exp", ngrams=ngrams))
    row = "n-grams in use, of a table on the disk"
    for arguments in (("--ram", "1G"), ("--vram", "1G")):
        _, shown, _ = run("plan", str(tmp_path / "with.gguf"), *arguments, "--json")
        found = json.loads(shown)["plan"]["fixed"]
        assert found["weights"] > found["host_ngrams"] > 0
        _, shown, _ = run("plan", str(tmp_path / "with.gguf"), *arguments)
        assert re.search(rf"{row} +RAM +{found['host_ngrams'] / 2**20:.2f} MiB", shown)
        _, shown, _ = run("plan", str(tmp_path / "without.gguf"), *arguments)
        assert row not in shown


def test_a_plan_says_what_drafts_and_why(run: Run, model: Path, tmp_path: Path) -> None:
    deep = write_gguf(tmp_path / "deep.gguf", nextn=True, dims=Dims(layers=16, experts=4, vocab=300))[0]
    asked = ("--device", "cpu", "--ram", "2G", "-c", "100")
    for path, options, said in (
        (model, (), "none: the file has no block for multi-token prediction"),
        (deep, (), r"mtp, as far as they pay: a token that .* drafts reads [1-9]% of the bytes of .*"),
        (deep, ("--spec-type", "none"), "none, as asked for"),
    ):
        _, _, error = run("plan", str(path), *asked, *options)
        assert re.search(f"drafts: {said}", error), error
        document = as_json(run, str(path), *asked, *options)
        assert re.fullmatch(said, document["draft_reason"])
        assert document["plan"]["spec_type"] == re.split("[,:]", document["draft_reason"])[0]


def test_contexts_side_by_side_are_those_of_a_server(run: Run, model: Path) -> None:
    arguments = ("--device", "cpu", "-c", "512", "--ram", "2G")
    fixed = {
        parallel: as_json(run, str(model), *arguments, "--parallel", parallel)["plan"]["fixed"]
        for parallel in ("1", "4", "auto")
    }
    assert [each["num_contexts"] for each in fixed.values()] == [1, 4, 64]
    assert fixed["4"]["caches"] == 4 * fixed["1"]["caches"]
    assert as_json(run, str(model), *arguments)["plan"]["fixed"] == fixed["1"]
    for wrong, code in {"0": 2, "65": 2, "many": 2}.items():
        assert run("plan", str(model), *arguments, "--parallel", wrong)[0] == code


def test_kept_prefixes_of_prompts_are_a_row_of_ram(run: Run, model: Path) -> None:
    *arguments, budget = in_ram(run, model)
    more = (*arguments, str(int(budget) + 3 * 2**20), "--prompt-cache", "3M")
    code, shown, _ = run("plan", str(model), *more, "--out", "my.plan")
    assert code == 0
    assert re.search(r"\n *kept prefixes of prompts +RAM +3\.00 MiB *\n", shown), shown
    kept, alone = as_json(run, str(model), *more), as_json(run, str(model), *arguments, budget)
    assert kept["plan"]["prompt_cache_bytes"] == kept["plan"]["fixed"]["prompt_cache"] == 3 * 2**20
    assert kept["plan"]["resident"] == alone["plan"]["resident"]
    assert kept["forecast"]["hit_rate"] == alone["forecast"]["hit_rate"]
    assert "kept prefixes" not in run("plan", str(model), *arguments, budget)[1]
    assert as_json(run, str(model), "--device", "cpu", "--plan", "my.plan")["plan"] == kept["plan"]
    code, _, error = run("plan", str(model), *arguments, budget, "--prompt-cache", "1G")
    assert code == 71
    found = re.search(r"the prompt cache 1\.00, .*; try --ram (\d+)M, or --prompt-cache (\d+)M", error)
    assert found, error
    assert run("plan", str(model), *arguments, f"{found[1]}M", "--prompt-cache", "1G")[0] == 0
    assert run("plan", str(model), *arguments, budget, "--prompt-cache", f"{found[2]}M")[0] == 0
    assert run("plan", str(model), "--prompt-cache", "folder")[0] == 2


@no_gpu
def test_kept_prefixes_of_prompts_are_a_row_of_ram_beside_a_gpu(run: Run, model: Path) -> None:
    code, shown, _ = run("plan", str(model), "--vram", "500M", "--prompt-cache", "3M")
    assert code == 0
    assert re.search(r"together +GPU memory .*\n *kept prefixes of prompts +RAM +3\.00 MiB *\n", shown), shown
    arguments = ("-c", "64", "--vram")
    half = (*arguments, str(least(run, model, *arguments) + 2**20), "--prompt-cache", "3M")
    found = re.search(r"try --ram (\d+M)", run("plan", str(model), *half, "--ram", "1M")[2])
    assert found
    code, shown, _ = run("plan", str(model), *half, "--ram", found[1])
    assert code == 0
    assert re.search(r"kept prefixes of prompts +RAM +3\.00 MiB *\n *\d+ experts of", shown), shown
    assert shown.count("kept prefixes") == 1


@pytest.mark.sharded(of="processes")
@no_gpu
def test_a_plan_for_a_gpu_that_is_not_there_names_what_it_assumes(run: Run, model: Path) -> None:
    code, shown, error = run("plan", str(model), "--vram", "500M")
    assert code == 0
    assert "the driver's reserve" in shown
    assert "experts on their way" not in shown
    assert re.search(r"assumed: GPU memory 400 GB/s, GPU products 150 TOPS\n", error)
    arguments = ("-c", "64", "--vram")
    half = str(least(run, model, *arguments) + 2**20)
    code, shown, error = run("plan", str(model), *arguments, half)
    assert code == 0
    assert re.search(r"experts on their way in prefill +GPU memory", shown)
    assert re.search(r"saved by prefetching, µs a token +(none|\d+) ", shown)
    assert "link 24 GB/s" in error
    assert re.search(
        r"of 1, 2, … experts that a token misses \d, \d come over the bus at first, \d+ CPU threads compute "
        r"the others, and some of prompts in steps of up to 256 tokens; "
        r"up to 64\.00 MiB of experts are copied",
        error,
    ), error
    assert "both shares and the number of threads " in error
    assert "fetched ahead" not in run("plan", str(model), *arguments, half, "--prefetch", "0")[1]
    code, shown, error = run("plan", str(model), *arguments, half, "--prefetch", "2")
    assert code == 0
    assert re.search(
        r"in prefill +GPU memory .*\n +of that 0\.82 MiB for 2 a layer fetched 2 layers ahead *\n", shown
    ), shown


@pytest.mark.sharded(of="processes")
@no_gpu
def test_a_plan_as_json_adds_up_and_never_exceeds_the_budget(run: Run, model: Path, tmp_path: Path) -> None:
    decode = []
    first = least(run, model, "-c", "64", "--vram")
    for budget in (first, first + 2**20, first + 2 * 2**20, first + 2**28):
        document = as_json(run, str(model), "--vram", str(budget), "-c", "64")
        plan = document["plan"]
        fixed = sum(
            value
            for name, value in plan["fixed"].items()
            if name in ("weights", "caches", "workspace", "drafter", "graphs", "reserve")
        )
        resident = sum(
            len(ids) * size for ids, size in zip(plan["resident"], plan["expert_bytes"], strict=True)
        )
        assert fixed + plan["ring_bytes"] + resident <= plan["budget_bytes"] == budget
        assert document["rates"]["read_bytes_per_s"] > 0
        assert "link_bytes_per_s" in document["rates"]["assumed"]
        assert (document["forecast_with_next_gib"] is None) == (resident == 8 * sum(plan["expert_bytes"]))
        decode.append(document["forecast"]["decode"])
    assert decode == sorted(decode)
    assert decode[0] < decode[-1]


@no_gpu
@pytest.mark.parametrize("flag", ["--vram", "--ram"])
def test_a_budget_below_the_minimum_says_what_it_is_made_of(run: Run, model: Path, flag: str) -> None:
    code, shown, error = run("plan", str(model), flag, "1M", "-c", "4096")
    assert (code, shown) == (71, "")
    assert re.search(rf"{flag}: 1.00 MiB of .* are below the minimum of [\d.]+ MiB: weights", error)
    assert "caches of 4096 tokens" in error
    assert error.count("\n") == 1


@pytest.mark.sharded(of="processes")
def test_rates_are_named_with_their_date_and_measured_again_on_request(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    code, _, error = run("plan", str(model), "--device", "cpu")
    assert code == 0
    assert re.search(
        r"measured \d{4}-\d\d-\d\d \d\d:\d\d UTC, today: RAM [\d.e+]+ GB/s, products of one row "
        r"[\d.e+]+ GB/s, attention of one row [\d.e+]+ GB/s; --measure does",
        error,
    )
    assert "under load" not in error
    document = json.loads(default_path().read_text())
    document["cpu"]["rates"]["read_bytes_per_s"] = 5e6
    default_path().write_text(json.dumps(document))
    assert as_json(run, str(model), "--device", "cpu")["rates"]["read_bytes_per_s"] == 5e6
    assert as_json(run, str(model), "--device", "cpu", "--measure")["rates"]["read_bytes_per_s"] > 1e6
    assert as_json(run, str(model), "--device", "cpu")["rates"]["read_bytes_per_s"] > 1e6


def test_the_last_runs_are_printed_beside_what_was_expected_of_them(
    run: Run, model: Path, home: Path
) -> None:
    path = runs_path()
    assert path is not None
    with GGUFFile.open(model) as file:
        fingerprint = file.fingerprint
    last = LastRun("2026-01-02 03:04 UTC", 2**30, 99, 4e-3, 3e-3, 0.5, 0.6, 1.5, None)
    keep_run(measured_hardware(None, path=default_path()), fingerprint, last, path)
    _, _, error = run("plan", str(model), "--device", "cpu")
    assert f"{described(last)}\n" in error
    assert as_json(run, str(model), "--device", "cpu")["last_runs"] == [asdict(last)]
    path.write_text("{")
    _, _, error = run("plan", str(model), "--device", "cpu")
    assert (
        f"warning: the kept runs in {path} are damaged, and left out until the next run replaces them\n"
        in error
    )
    assert as_json(run, str(model), "--device", "cpu")["last_runs"] == []
    path.unlink()


def test_rates_that_were_measured_under_load_are_named_so(
    run: Run, model: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = default_path()
    assert path is not None
    path.parent.mkdir(parents=True)
    document = json.loads((home / ".cache/coldstream/hardware.json").read_text())
    document["cpu"]["conditions"].update(other_cpus=1.5, num_cpus=2, num_tries=4)
    document["cpu"]["measured_at"] = "2024-01-02 03:04 UTC"
    path.write_text(json.dumps(document))
    code, _, error = run("plan", str(model), "--device", "cpu")
    assert code == 0
    assert re.search(r"measured 2024-01-02 03:04 UTC, \d+ days ago: RAM", error)
    assert "that was under load (other programs took 1.5 of 2 CPUs), as were others before it" in error
    code, shown, _ = run("doctor")
    assert re.search(r"measured +2024-01-02 03:04 UTC, \d+ days ago, under load", shown)
    assert "other programs took 1.5 of 2 CPUs: close other programs" in shown
    path.write_text("{")
    code, _, error = run("plan", str(model), "--device", "cpu")
    assert code == 0
    assert error.count("are damaged: a plan that needs rates measures them again") == 1


@pytest.mark.sharded(of="processes")
def test_a_trace_says_which_experts_and_how_often_they_are_found(run: Run, model: Path) -> None:
    assert run("profile", str(model), "--text", "text.py", "--threads", "1")[0] == 0
    budget = in_ram(run, model)
    plain = as_json(run, str(model), *budget)
    profiled = as_json(run, str(model), *budget, "--profile", "tiny.routing")
    assert "replay of the last" in profiled["hit_rates_from"]
    assert profiled["plan"]["resident"] != plain["plan"]["resident"]
    assert profiled["forecast"]["hit_rate"] > 0


def test_pinned_layers_and_a_written_plan(run: Run, model: Path, tmp_path: Path) -> None:
    arguments = (*in_ram(run, model), "--pin-layers", "2", "--out", "my.json")
    document = as_json(run, str(model), *arguments)
    assert document["plan"]["pinned_layers"] == [0, 3]
    assert document["plan"]["resident"][0] == list(range(8))
    assert json.loads((tmp_path / "my.json").read_text()) == document["plan"]


@pytest.mark.sharded(of="processes")
def test_weights_of_layers_are_in_the_plan_and_said(run: Run, model: Path, tmp_path: Path) -> None:
    arguments = (str(model), *in_ram(run, model), "--layer-weights", "1-2=4,3=1.5", "--out", "my.json")
    document = as_json(run, *arguments)
    assert document["plan"]["layer_weights"] == [1.0, 4.0, 4.0, 1.5]
    counts = [len(ids) for ids in document["plan"]["resident"]]
    assert min(counts[1:3]) > max(counts[0], counts[3])
    assert json.loads((tmp_path / "my.json").read_text()) == document["plan"]
    code, _, error = run("plan", *arguments)
    assert code == 0
    assert "a use of an expert counts for 4 in layers 1 to 2, 1.5 in layer 3\n" in error
    assert "counts for" not in run("plan", str(model), *in_ram(run, model))[2]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("none.gguf",), 66, "no such file"),
        (("--profile", "none.routing"), 66, "none.routing"),
        (("--profile", "text.py"), 65, "not a routing trace"),
        (("--out", "no/such/folder.json"), 2, "cannot be written"),
        (("--ram", "plenty"), 2, "--ram"),
        (("--device", "cpu", "--vram", "1G"), 2, "leave --vram out"),
        (("-c", "5000"), 2, "beyond the 4096 tokens"),
        (("--pin-layers", "-1"), 2, "--pin-layers"),
        (("--layer-weights", "1"), 2, "--layer-weights"),
        (("--layer-weights", "2-4=3"), 2, "--layer-weights 4=3: 4 layers can have a weight, from 0 to 3"),
        (("--pin-layers", "99"), 2, "--pin-layers 99: 4 layers can be pinned, so it can be 0 to 4"),
    ],
)
def test_bad_input_is_one_line(
    run: Run, model: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    named = arguments if arguments[0].endswith(".gguf") else (str(model), *arguments)
    got, shown, error = run("plan", *named)
    assert (got, shown) == (code, "")
    assert message in error
    assert error.count("\n") == 1


def test_a_dense_model_has_a_plan_too(run: Run, model: Path, tmp_path: Path) -> None:
    (path,) = write_gguf(tmp_path / "dense.gguf", "qwen35")
    code, shown, _ = run("plan", str(path), "--device", "cpu")
    assert code == 0
    assert "experts" not in shown
    assert run("plan", str(path), "--device", "cpu", "--profile", "x")[0] == 65


def test_a_dense_model_that_does_not_fit_a_gpu_says_who_computes_its_layers(
    run: Run, model: Path, tmp_path: Path
) -> None:
    (path,) = write_gguf(tmp_path / "dense.gguf", "qwen35")
    _, _, error = run("plan", str(path), "-c", "100", "--vram", "1M")
    advised = re.search(r"try --vram (\d+)M", error)
    assert advised, error
    code, shown, notes = run("plan", str(path), "-c", "100", "--vram", f"{advised[1]}M")
    assert code == 0
    assert re.search("3 of 4 feed-forward networks +RAM", shown), shown
    assert "layers on their way" in shown
    assert "experts" not in shown + notes
    by_cpu = r"(\d) with 1, \d with 8, \d with 64 tokens in a step"
    found = re.search(rf"of the 3 missing networks \d+ CPU threads compute {by_cpu}", notes)
    assert found, notes
    assert int(found[1]) <= 3


@pytest.mark.usefixtures("model")
def test_keys_and_values_of_windows_are_a_part_of_the_caches(run: Run, tmp_path: Path) -> None:
    (path,) = write_gguf(tmp_path / "windows.gguf", "gpt-oss", dims=Dims(context=32_768))
    for ctx_size, has_row in ((512, False), (32_768, True)):
        arguments = ("plan", str(path), "--vram", "600M", "-c", str(ctx_size))
        fixed = json.loads(run(*arguments, "--json")[1])["plan"]["fixed"]
        row = rf"\n *of that .*B for layers with windows, in {fixed['num_window_blocks']} blocks *\n"
        assert bool(re.search(row, run(*arguments)[1])) == has_row
        assert (fixed["num_window_blocks"] > 0) == (fixed["window_caches"] > 0) == has_row
        assert fixed["window_caches"] < fixed["caches"]
