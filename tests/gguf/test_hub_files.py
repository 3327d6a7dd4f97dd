"""Which files of a listing make up the model that a name means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.errors import DownloadError, ModelNotFoundError
from coldstream.gguf.hub_files import (
    HubName,
    check_relative,
    choose,
    choose_sidecar,
    enumerate_some,
    group_models,
)

UNSLOTH = [
    *("Qwen3.6-35B-A3B-UD-Q4_K_XL.gguf", "Qwen3.6-35B-A3B-UD-Q4_K_M.gguf", "Qwen3.6-35B-A3B-Q8_0.gguf"),
    *("Qwen3.6-35B-A3B-UD-IQ2_XXS.gguf", "Qwen3.6-35B-A3B-MXFP4_MOE.gguf", "Qwen3.6-35B-A3B-UD-Q4_K_S.gguf"),
    *("BF16/Qwen3.6-35B-A3B-BF16-00001-of-00002.gguf", "BF16/Qwen3.6-35B-A3B-BF16-00002-of-00002.gguf"),
    *(
        "mmproj-BF16.gguf",
        "mmproj-F16.gguf",
        "imatrix_unsloth.gguf",
        "README.md",
        "mtp-Qwen3.6-35B-A3B-Q8_0.gguf",
    ),
]


def chosen(name: str, paths: list[str]) -> tuple[str, ...]:
    parsed = HubName.parse(name)
    assert parsed is not None
    return choose(parsed, group_models(paths)).files


@pytest.mark.parametrize(
    ("quant", "file"),
    [
        ("", UNSLOTH[1]),
        (":Q4_K_M", UNSLOTH[1]),
        (":ud-q4_k_m", UNSLOTH[1]),
        (":UD-Q4_K_XL", UNSLOTH[0]),
        (":Q4_K_XL", UNSLOTH[0]),
        (":Q8_0", UNSLOTH[2]),
        (":IQ2_XXS", UNSLOTH[3]),
        (":MXFP4_MOE", UNSLOTH[4]),
        (":BF16", UNSLOTH[6]),
        (":Qwen3.6-35B-A3B-UD-Q4_K_S.gguf", UNSLOTH[5]),
    ],
)
def test_quants_of_a_popular_repository(quant: str, file: str) -> None:
    assert chosen(f"org/repo{quant}", UNSLOTH)[0] == file


@pytest.mark.parametrize(
    ("model", "others", "expected"),
    [
        ("m-Q4_K_M.gguf", ["mtp-m-Q8_0.gguf", "mtp-m-Q4_K_M.gguf", "mtp-m.gguf"], "mtp-m-Q4_K_M.gguf"),
        ("m-Q4_K_M.gguf", ["mtp-m-Q8_0.gguf", "mtp-m-Q4_0.gguf", "mtp-m-BF16.gguf"], "mtp-m-Q4_0.gguf"),
        ("m-UD-Q2_K_XL.gguf", ["mtp-m-Q8_0.gguf", "mtp-m-BF16.gguf"], "mtp-m-Q8_0.gguf"),
        ("Q8_0/m.gguf", ["mtp-m-Q8_0.gguf", "Q8_0/mtp-m.gguf", "Q4_0/mtp-m-Q8_0.gguf"], "Q8_0/mtp-m.gguf"),
        ("Q8_0/m.gguf", ["mtp-m.gguf", "Q4_0/mtp-m.gguf"], "mtp-m.gguf"),
        ("m-Q8_0.gguf", ["MTP/mtp-m-Q8_0.gguf", "m-MTP-Q8_0.gguf", "mtp-m-Q8_0.bin"], None),
    ],
)
def test_a_sidecar_is_the_one_that_llama_cpp_takes(
    model: str, others: list[str], expected: str | None
) -> None:
    """In the model's folder or around it, nearest first; of the same quant, or of about as many bits."""
    (files,) = group_models([model])
    for paths in ([model, *others], [*reversed(others), model]):
        assert choose_sidecar(files, paths) == expected


def test_a_lone_head_is_a_model_only_if_it_is_named() -> None:
    paths = ["m-Q8_0.gguf", "MTP/mtp-m-Q8_0.gguf", "mmproj-F16.gguf"]
    assert [model.files for model in group_models(paths)] == [("m-Q8_0.gguf",)]
    assert [model.files for model in group_models(paths, paths[1])] == [(paths[1],), (paths[0],)]


def test_the_exact_label_wins_over_the_dynamic_one() -> None:
    assert chosen("o/r", ["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"]) == ("m-Q4_K_M.gguf",)


def test_the_only_model_is_the_default() -> None:
    assert chosen("o/r", ["m.gguf", "mmproj-m.gguf"]) == ("m.gguf",)
    with pytest.raises(ModelNotFoundError, match=r"no complete Q4_K_M; there is m\.gguf"):
        chosen("o/r:Q4_K_M", ["m.gguf"])


def test_a_folder_may_carry_the_quant() -> None:
    assert chosen("o/r:Q5_K_M", ["Q5_K_M/m.gguf", "Q6_K/m.gguf"]) == ("Q5_K_M/m.gguf",)


def test_several_models_of_one_quant_are_listed() -> None:
    paths = ["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"]
    with pytest.raises(
        ModelNotFoundError, match=r"several models are Q4_K_M: name a file; .*a-Q4_K_M\.gguf, b-Q4"
    ):
        chosen("o/r", paths)
    assert chosen("o/r:b-Q4_K_M.gguf", paths) == ("b-Q4_K_M.gguf",)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_gg14_missing_part(missing: int) -> None:
    paths = [f"m-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    del paths[missing]
    with pytest.raises(ModelNotFoundError, match=r"Q4_K_M \(2 of 3 parts\)"):
        chosen("o/r", paths)


@pytest.mark.parametrize("numbers", [(0, 1), (1, 3), (2, 2), (0,), (3,), (0, 3)])
def test_gg14_part_numbers_out_of_range(numbers: tuple[int, ...]) -> None:
    for stem in ("m-Q4_K_M", "m"):
        with pytest.raises(ModelNotFoundError, match="no complete"):
            chosen("o/r", [f"{stem}-{number:05}-of-00002.gguf" for number in numbers])


def test_long_listings_are_shortened() -> None:
    with pytest.raises(ModelNotFoundError, match="and 88 more"):
        chosen("o/r", [f"m{index}.gguf" for index in range(100)])


@pytest.mark.parametrize(("count", "end"), [(11, "m10"), (12, "m11"), (13, "m11.gguf and 1 more")])
def test_a_listing_says_how_many_more_there_are(count: int, end: str) -> None:
    text = enumerate_some(f"m{index:02}.gguf" for index in range(count))
    assert text.removesuffix(".gguf").endswith(end)
    assert text.count(".gguf") == min(count, 12)


def test_of_several_quants_in_a_name_the_last_one_is_its_own() -> None:
    (model,) = group_models(["m-of-F16-Q4_K_M.gguf"])
    assert model.quant == "Q4_K_M"
    (model,) = group_models(["BF16/m-F16-Q8_0-00001-of-00001.gguf"])
    assert model.quant == "Q8_0"


PARTS = st.sampled_from(["a", "..", ".", "", "b c", "\\", "C:", "é", "\n", "...", "~"])


@given(parts=st.lists(PARTS, min_size=1, max_size=4))
def test_gg14_accepted_paths_stay_inside(parts: list[str]) -> None:
    path = "/".join([*parts, "m.gguf"])
    try:
        check_relative(path)
    except DownloadError:
        return
    inside = [part for part in path.split("/") if part not in ("", ".", "..")]
    assert inside == path.split("/")
    assert not set(path) & set("\\:\n")


@pytest.mark.parametrize(
    ("name", "repo", "quant"),
    [
        ("o/r", "o/r", None),
        ("o.x/r-1_2:UD-Q4_K_XL", "o.x/r-1_2", "UD-Q4_K_XL"),
        ("o/r:a/b.gguf", "o/r", "a/b.gguf"),
    ],
)
def test_hub_names(name: str, repo: str, quant: str | None) -> None:
    parsed = HubName.parse(name)
    assert parsed == HubName(repo, quant)
    assert str(parsed) == name


@pytest.mark.parametrize("host", ["https://huggingface.co/", "http://hf.co/", "huggingface.co/", "hf.co/"])
@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("o/r", "o/r"),
        ("o/r/", "o/r"),
        ("o/r:Q8_0", "o/r:Q8_0"),
        ("o/r?library=x/y", "o/r"),
        ("o/r#files", "o/r"),
        ("o/r/tree/main", "o/r"),
        ("o/r/tree/main/Q8_0", "o/r:Q8_0"),
        ("o/r/blob/main/a/b.gguf", "o/r:a/b.gguf"),
        ("o/r/resolve/main/b.gguf?download=true", "o/r:b.gguf"),
    ],
)
def test_addresses_of_pages_are_names(host: str, page: str, name: str) -> None:
    assert str(HubName.parse(host + page)) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "o", "o/", "/r", "o/r/s", "../r", "o/..", "o/r:", "o/r:a b", "o r/s", "ö/r"),
        *("hf.co/o", "https://hf.co/", "https://example.com/o/r", "hf.co/o/r/tree/other", "hf.co/../r"),
        *("o/r/tree/main", "https://hf.co/hf.co/o/r"),
    ],
)
def test_names_that_are_no_hub_names(name: str) -> None:
    assert HubName.parse(name) is None
