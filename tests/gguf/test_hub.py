"""Names become files: local paths, the shared cache, and downloads from an imitated hub that goes wrong."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from coldstream.errors import DownloadError, ModelNotFoundError
from coldstream.gguf import hub as hub_module
from coldstream.gguf.hub import Hub, list_cached, pull, resolve_model, resolve_sidecar
from coldstream.gguf.hub_files import ModelFiles
from hub_server import REPO, HubServer

MODEL = "Tiny-Q4_K_M.gguf"
SPLIT = ["Q8_0/Tiny-Q8_0-00001-of-00002.gguf", "Q8_0/Tiny-Q8_0-00002-of-00002.gguf"]


@pytest.fixture
def server() -> Iterator[HubServer]:
    content = random.Random(0).randbytes
    files = {path: content(50_000 + index) for index, path in enumerate([MODEL, *SPLIT])}
    files |= {"mmproj-F16.gguf": b"vision", "mtp-Tiny-Q4_K_M.gguf": b"head", "README.md": b"words"}
    with HubServer(files) as server:
        yield server


@pytest.fixture
def hub(server: HubServer, tmp_path: Path) -> Hub:
    return Hub(cache_dir=tmp_path / "cache", endpoint=server.endpoint)


def leftovers(hub: Hub) -> list[Path]:
    return [path for path in hub.folder().rglob("*") if path.name.endswith(".incomplete")]


def test_pull_downloads_the_default_quant_with_progress(server: HubServer, hub: Hub) -> None:
    seen: list[tuple[str, int, int]] = []
    path = pull(REPO, hub=hub, progress=lambda *step: seen.append(step))
    assert path.read_bytes() == server.files[MODEL]
    assert {name for name, _, _ in seen} == {MODEL, f"checking {MODEL}"}
    downloaded = [done for name, done, _ in seen if name == MODEL]
    assert downloaded == sorted(downloaded)
    assert seen[-1] == (MODEL, 50_000, 50_000)
    assert not leftovers(hub)


def test_pull_downloads_every_part_of_a_split_model(server: HubServer, hub: Hub) -> None:
    first = pull(f"{REPO}:q8_0", hub=hub)
    assert first.name == Path(SPLIT[0]).name
    assert [(first.parent / Path(part).name).read_bytes() for part in SPLIT] == [
        server.files[part] for part in SPLIT
    ]


def test_resolve_downloads_once_and_needs_no_network_afterwards(server: HubServer, hub: Hub) -> None:
    path = resolve_model(REPO, hub=hub)
    server.status = 500
    asked = len(server.requests)
    assert resolve_model(REPO, hub=hub) == path
    assert resolve_model(f"{REPO}:Q4_K_M", hub=hub, offline=True) == path
    assert resolve_model(f"{REPO}:{MODEL}", hub=hub) == path
    assert len(server.requests) == asked


HEAD = "mtp-Tiny-Q4_K_M.gguf"


def test_the_sidecar_of_a_model_is_downloaded_once(server: HubServer, hub: Hub) -> None:
    resolve_model(REPO, hub=hub)
    assert resolve_sidecar(REPO, hub=hub, offline=True) is None
    path = resolve_sidecar(REPO, hub=hub)
    assert path is not None
    assert (path.name, path.read_bytes()) == (HEAD, server.files[HEAD])
    asked = len(server.requests)
    assert resolve_sidecar(REPO, hub=hub) == resolve_sidecar(f"{REPO}:Q4_K_M", hub=hub, offline=True) == path
    assert len(server.requests) == asked
    assert [model.paths[0].name for model in list_cached(hub)] == [MODEL]


def test_a_model_without_a_sidecar_has_none(server: HubServer, hub: Hub) -> None:
    del server.files[HEAD], server.listed[HEAD]
    path = resolve_model(REPO, hub=hub)
    assert resolve_sidecar(REPO, hub=hub) is None
    assert resolve_sidecar(str(path), hub=hub) is None
    server.status = 500
    with pytest.raises(DownloadError, match="answered 500"):
        resolve_sidecar(REPO, hub=hub)


def test_a_sidecar_is_pulled_by_its_name(server: HubServer, hub: Hub) -> None:
    path = pull(f"{REPO}:{HEAD}", hub=hub)
    assert path.read_bytes() == server.files[HEAD]
    assert resolve_model(f"{REPO}:{HEAD}", hub=hub, offline=True) == path
    assert not list_cached(hub)


def test_offline_means_no_request(server: HubServer, hub: Hub) -> None:
    with pytest.raises(ModelNotFoundError, match=rf"not in the cache.*coldstream pull {REPO}"):
        resolve_model(REPO, hub=hub, offline=True)
    assert not server.requests


def test_half_cached_split_model_is_completed(server: HubServer, hub: Hub) -> None:
    first = pull(f"{REPO}:Q8_0", hub=hub)
    second = first.with_name(Path(SPLIT[1]).name)
    second.resolve().unlink()
    second.unlink()
    with pytest.raises(ModelNotFoundError, match=r"Q8_0 \(1 of 2 parts\)"):
        resolve_model(f"{REPO}:Q8_0", hub=hub, offline=True)
    assert resolve_model(f"{REPO}:Q8_0", hub=hub) == first
    assert second.read_bytes() == server.files[SPLIT[1]]
    assert [path.rsplit("/", 1)[1] for path, _ in server.downloads()].count(first.name) == 1


def test_a_download_that_fails_in_the_middle_leaves_nothing(server: HubServer, hub: Hub) -> None:
    server.drop_after, server.status_after_drop = 20_000, 500
    with pytest.raises(DownloadError, match=r"answered 500|download failed"):
        pull(REPO, hub=hub)
    assert not leftovers(hub)
    assert not list_cached(hub)
    server.status = None
    assert pull(REPO, hub=hub).read_bytes() == server.files[MODEL]


def test_an_interrupted_download_is_no_model_yet(server: HubServer, hub: Hub) -> None:
    def interrupt(name: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(REPO, hub=hub, progress=interrupt)
    assert not list_cached(hub)
    assert resolve_model(REPO, hub=hub).read_bytes() == server.files[MODEL]
    assert len(server.downloads()) == 1


def test_another_size_than_listed_is_refused(server: HubServer, hub: Hub) -> None:
    server.listed[MODEL] = 49_999
    with pytest.raises(DownloadError, match="50000 bytes, listed as 49999"):
        pull(REPO, hub=hub)


@pytest.mark.parametrize(
    ("status", "error", "advice"),
    [
        (404, ModelNotFoundError, "the hub has no such repository"),
        (401, DownloadError, "hf auth login"),
        (403, DownloadError, "hf auth login"),
        (500, DownloadError, "answered 500"),
        (418, DownloadError, "answered 418"),
    ],
)
def test_refusals_of_the_hub(
    server: HubServer, hub: Hub, status: int, error: type[Exception], advice: str
) -> None:
    server.status = status
    with pytest.raises(error, match=advice):
        pull(REPO, hub=hub)
    assert not list_cached(hub)


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    with HubServer({}) as gone:
        endpoint = gone.endpoint
    with pytest.raises(DownloadError, match="download failed"):
        pull(REPO, hub=Hub(tmp_path, endpoint))


@pytest.mark.parametrize(
    "path",
    [
        *("../evil-Q4_K_M.gguf", "a/../../evil-Q4_K_M.gguf", "/etc/evil-Q4_K_M.gguf", "a//evil-Q4_K_M.gguf"),
        *("..\\evil-Q4_K_M.gguf", "C:evil-Q4_K_M.gguf", "./evil-Q4_K_M.gguf", "a\n/evil-Q4_K_M.gguf"),
    ],
)
def test_gg14_hostile_listing_writes_nothing(server: HubServer, hub: Hub, path: str, tmp_path: Path) -> None:
    server.files[path] = b"evil"
    server.listed[path] = 4
    with pytest.raises(DownloadError, match="unsafe file name"):
        pull(REPO, hub=hub)
    assert not server.downloads()
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("answer", [{}, [], "x", 3])
@pytest.mark.parametrize(
    "siblings", [None, {}, 3, [1], [{}], [{"rfilename": 3}], [{"rfilename": "m.gguf", "size": "1"}]]
)
def test_a_listing_that_makes_no_sense(server: HubServer, hub: Hub, answer: object, siblings: object) -> None:
    server.answer = {"id": REPO, "siblings": siblings} if answer == {} else answer
    with pytest.raises((DownloadError, ModelNotFoundError)):
        pull(REPO, hub=hub)
    assert not server.downloads()


def test_what_is_not_there_lists_what_is(hub: Hub) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no complete Q6_K; there is Q8_0, Q4_K_M"):
        pull(f"{REPO}:Q6_K", hub=hub)
    with pytest.raises(ModelNotFoundError, match=r"no complete Q4_K_N \(did you mean Q4_K_M\?\); there is"):
        pull(f"{REPO}:Q4_K_N", hub=hub)


def test_a_misspelt_repository_gets_the_right_one_suggested(server: HubServer, hub: Hub) -> None:
    server.repos = ["org/other", REPO]
    with pytest.raises(ModelNotFoundError, match=rf"has no such repository or file; did you mean {REPO}\?$"):
        pull("org/tiny-GUFF", hub=hub)
    pull(REPO, hub=hub)
    server.status = 403
    with pytest.raises(DownloadError, match=rf"hf auth login`; did you mean {REPO}\?$"):  # from the cache
        pull("org/tinny-GGUF", hub=hub)


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_file_whose_bytes_vanished_is_no_model_until_it_is_pulled(
    server: HubServer, hub: Hub, is_empty: bool
) -> None:
    path = pull(REPO, hub=hub)
    if is_empty:
        path.resolve().write_bytes(b"")
    else:
        path.resolve().unlink()
    assert list_cached(hub) == []
    gone = rf"{REPO}: the cache names {MODEL}, but its bytes are gone; run `coldstream pull {REPO}`"
    with pytest.raises(ModelNotFoundError, match=gone):
        resolve_model(REPO, hub=hub, offline=True)
    assert resolve_model(REPO, hub=hub) == path
    assert path.read_bytes() == server.files[MODEL]
    assert [model.paths for model in list_cached(hub)] == [(path,)]


def test_a_model_removed_while_it_is_listed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull(REPO, hub=hub)
    group = hub_module.group_models

    def group_and_remove(paths: Iterable[str], named: str | None = None) -> list[ModelFiles]:
        models = group(paths, named)
        path.unlink()
        return models

    monkeypatch.setattr(hub_module, "group_models", group_and_remove)
    assert list_cached(hub) == []


def test_list_cached(server: HubServer, hub: Hub) -> None:
    assert list_cached(hub) == []
    pull(f"{REPO}:Q8_0", hub=hub)
    path = pull(REPO, hub=hub)
    eight, four = sorted(list_cached(hub), key=lambda model: -model.num_bytes)
    assert (four.name, four.quant, four.paths) == (f"{REPO}:Q4_K_M", "Q4_K_M", (path,))
    assert (eight.name, len(eight.paths), eight.num_bytes) == (f"{REPO}:Q8_0", 2, 100_003)
    assert four.modified.timestamp() == pytest.approx(path.stat().st_mtime)
    assert resolve_model(eight.name, hub=hub, offline=True) == eight.paths[0]


def test_local_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x")
    assert resolve_model(str(path)) == path


def test_a_file_whose_name_begins_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "~m.gguf").write_bytes(b"x")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "n.gguf").write_bytes(b"x")
    assert resolve_model("~m.gguf") == resolve_model("./~m.gguf") == Path("~m.gguf")
    assert resolve_model("~/n.gguf") == tmp_path / "home" / "n.gguf"


def test_the_address_of_a_page_finds_what_its_name_does(server: HubServer, hub: Hub) -> None:
    assert resolve_model(f"https://huggingface.co/{REPO}", hub=hub) == resolve_model(REPO, hub=hub)
    assert resolve_model(f"hf.co/{REPO}/blob/main/{MODEL}", hub=hub, offline=True).name == MODEL
    assert pull(f"hf.co/{REPO}:Q4_K_M", hub=hub).name == MODEL


def test_folder_with_one_model(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    assert resolve_model(str(tmp_path)) == tmp_path / "m-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([], "no model"),
        (["a.gguf", "b.gguf"], r"a\.gguf, b\.gguf: name a file"),
        (["m-Q4_K_M.gguf", "m-Q8_0.gguf"], r"m-Q4_K_M\.gguf, m-Q8_0\.gguf: name a file"),
        (["m-00002-of-00002.gguf"], r"\(1 of 2 parts\)"),
    ],
)
def test_folder_with_none_or_several_models(tmp_path: Path, names: list[str], problem: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=problem):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "missing.gguf",
        "folder/missing.gguf",
        "/no/such/model",
        "a b/c",
        "org",
        "../x",
        "a/b/c",
        "./..",
        "",
        "~/x/y",
        "~nobody-here/x",
        "a" * 5000,
        "a\0b",
    ],
)
def test_names_of_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError):
        resolve_model(name, hub=Hub(tmp_path), offline=True)


@pytest.mark.parametrize(
    "name", ["org", "a/b/c", "model.gguf", "../x", "a/..", "-", "org/repo:Q4 K", "org/rep\u00f6"]
)
def test_pull_wants_a_hub_name(name: str, hub: Hub) -> None:
    with pytest.raises(ModelNotFoundError, match="org/repo"):
        pull(name, hub=hub)
