"""Downloads that were killed, damaged files, what others left and full disks, against an imitated hub."""

import hashlib
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import filelock
import pytest

from coldstream.errors import DownloadError, StorageError
from coldstream.gguf.hub import Hub, list_cached, pull, resolve_model
from coldstream.gguf.hub_download import IDLE_S
from hub_server import REPO, HubServer

MODEL = "Tiny-Q4_K_M.gguf"
CHUNK_BYTES = 10 * 2**20  # what huggingface_hub writes at once
LARGE = random.Random(1).randbytes(2 * CHUNK_BYTES + 5)
FOLDER = "models--org--tiny-GGUF"


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer({MODEL: LARGE}) as server:
        yield server


@pytest.fixture
def hub(server: HubServer, tmp_path: Path) -> Hub:
    return Hub(cache_dir=tmp_path / "cache", endpoint=server.endpoint)


@pytest.fixture
def blobs(hub: Hub) -> Path:
    folder = hub.folder() / FOLDER / "blobs"
    folder.mkdir(parents=True)
    return folder


def _command(server: HubServer, hub: Hub, **options: object) -> subprocess.Popen[str]:
    """`coldstream pull` as a process, with pipes."""
    places = {"HF_ENDPOINT": server.endpoint, "HF_HUB_CACHE": str(hub.folder()), "HF_HOME": str(hub.folder())}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-m", "coldstream", "pull", REPO],
        env={**os.environ, **places, "PYTHONDONTWRITEBYTECODE": "1"},
        text=True,
        **{**pipes, **options},  # type: ignore[call-overload]
    )


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def starts(server: HubServer) -> list[int]:
    """Where each download began."""
    return [int((span or "bytes=0-").removeprefix("bytes=").rstrip("-")) for _, span in server.downloads()]


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_download_goes_on_where_it_was(
    server: HubServer, hub: Hub, blobs: Path, kind: signal.Signals
) -> None:
    server.stall_after = CHUNK_BYTES + 1000
    with _command(server, hub) as killed:
        assert killed.stderr is not None
        assert any(" 40 % " in line for line in killed.stderr)  # the first chunk is written, the server waits
        killed.send_signal(kind)
    assert [path.name for path in blobs.iterdir()] == [f"{digest_of(LARGE)}.incomplete"]
    assert not list_cached(hub)
    with _command(server, hub) as second:
        shown, notes = second.communicate()
    assert second.returncode == 0
    assert Path(shown.strip()).read_bytes() == LARGE
    assert starts(server) == [0, CHUNK_BYTES]
    assert f"going on at {CHUNK_BYTES:,} of {len(LARGE):,} bytes" in notes
    assert [path.name for path in blobs.iterdir()] == [digest_of(LARGE)]
    assert "Traceback" not in notes


def test_a_connection_that_breaks_is_taken_up_again(server: HubServer, hub: Hub) -> None:
    server.drop_after = len(LARGE) - 1
    assert pull(REPO, hub=hub).read_bytes() == LARGE
    assert starts(server) == [0, 2 * CHUNK_BYTES]


def test_a_busy_hub_is_asked_again_when_it_says(
    server: HubServer, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.busy = [{"Retry_After": "3"}, {"RateLimit": '"api";r=0;t=55'}, {"Retry_After": "99999"}, {}]
    slept: list[float] = []
    monkeypatch.setattr("coldstream.gguf.hub_download.time.sleep", slept.append)
    assert pull(REPO, hub=hub).read_bytes() == LARGE
    assert slept == [4.0, 56.0, 300.0, 8.0]
    server.busy = [{}] * 9
    path = hub.folder() / FOLDER / "blobs" / digest_of(LARGE)
    path.unlink()
    with pytest.raises(DownloadError, match="answered 429"):
        pull(REPO, hub=hub)
    assert len(server.busy) == 3


@pytest.mark.sharded(of="processes")
def test_a_hub_that_never_stops_sending_is_left(server: HubServer, hub: Hub, blobs: Path) -> None:
    server.surplus = 1 << 40
    with pytest.raises(DownloadError, match=r"what came is damaged: .* bytes, the hub lists"):
        pull(REPO, hub=hub)
    assert list(blobs.iterdir()) == []


def test_file_systems_without_locks_have_files_in_place_of_them(
    server: HubServer, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLock(filelock.FileLock):
        def _acquire(self) -> None:
            raise NotImplementedError("this file system has no flock; use SoftFileLock instead")

    monkeypatch.setattr(filelock, "FileLock", NoLock)
    path = hub.folder() / ".locks" / FOLDER / f"{digest_of(LARGE)}.lock"
    path.parent.mkdir(parents=True)
    other = filelock.SoftFileLock(path)
    other.acquire()
    notes: list[str] = []

    def hear(note: str) -> None:
        notes.append(note)
        other.release()

    assert pull(REPO, hub=hub, notice=hear).read_bytes() == LARGE
    assert notes == [f"{MODEL}: waiting for another process that downloads it"]


def test_a_hub_that_sends_all_of_it_again_is_understood(server: HubServer, hub: Hub, blobs: Path) -> None:
    (blobs / f"{digest_of(LARGE)}.incomplete").write_bytes(LARGE[:1000])
    server.ignores_ranges = True
    assert pull(REPO, hub=hub).read_bytes() == LARGE
    assert starts(server) == [1000], "what came is taken, and not asked for again"
    assert len(list(blobs.iterdir())) == 1


@pytest.mark.sharded
@pytest.mark.parametrize("part", [b"wrong" * 100, LARGE + b"more", b"w" * len(LARGE), b""])
def test_a_part_that_is_damaged_is_given_up(server: HubServer, hub: Hub, blobs: Path, part: bytes) -> None:
    (blobs / f"{digest_of(LARGE)}.incomplete").write_bytes(part)
    assert pull(REPO, hub=hub).read_bytes() == LARGE
    assert starts(server)[-1] == 0
    assert len(list(blobs.iterdir())) == 1


@pytest.mark.sharded
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (LARGE[:1000] + b"?" + LARGE[1001:], r"SHA-256 \w{12}…, the hub lists"),
        (LARGE[:-1], rf"{len(LARGE) - 1} bytes, the hub lists {len(LARGE)}"),
        (LARGE + b"?", rf"{len(LARGE) + 1} bytes, the hub lists {len(LARGE)}"),
    ],
)
def test_a_damaged_file_is_noticed_and_repaired(
    server: HubServer, hub: Hub, damage: bytes, problem: str
) -> None:
    path = pull(REPO, hub=hub)
    path.resolve().write_bytes(damage)
    notes: list[str] = []
    assert pull(REPO, hub=hub, notice=notes.append) == path
    assert path.read_bytes() == LARGE
    found, repaired = notes
    assert re.search(rf"^{MODEL} is damaged \({problem}.*\): repairing it$", found)
    assert repaired == f"{MODEL} is repaired"
    notes.clear()
    assert pull(REPO, hub=hub, notice=notes.append) == path
    assert notes == []
    assert len(server.downloads()) == 2


def test_a_repair_that_fails_leaves_nothing_that_is_taken_for_whole(server: HubServer, hub: Hub) -> None:
    path = pull(REPO, hub=hub)
    path.resolve().write_bytes(b"?" + LARGE[1:])
    server.drop_after, server.status_after_drop = CHUNK_BYTES + 1, 500
    with pytest.raises(DownloadError, match="answered 500"):
        pull(REPO, hub=hub)
    assert not list_cached(hub)
    server.status = None
    assert resolve_model(REPO, hub=hub) == path
    assert path.read_bytes() == LARGE
    assert starts(server)[-1] == CHUNK_BYTES


def test_what_comes_damaged_is_refused(server: HubServer, hub: Hub, blobs: Path) -> None:
    server.etags[MODEL] = digest_of(b"something else")
    with pytest.raises(DownloadError, match=r"what came is damaged: SHA-256 .* pull it again"):
        pull(REPO, hub=hub)
    assert list(blobs.iterdir()) == []
    assert not list_cached(hub)


def test_git_digests_and_unknown_ones(server: HubServer, hub: Hub) -> None:
    blob = b"blob %d\0" % len(LARGE) + LARGE
    server.etags[MODEL] = hashlib.sha1(blob).hexdigest()
    path = pull(REPO, hub=hub)
    path.resolve().write_bytes(b"?" + LARGE[1:])
    notes: list[str] = []
    pull(REPO, hub=hub, notice=notes.append)
    assert "SHA-1" in notes[0]
    assert path.read_bytes() == LARGE
    server.etags[MODEL], server.commit = "W-strange", "f" * 40
    server.files[MODEL] = LARGE  # the list's SHA-256 is what remains
    assert pull(REPO, hub=hub).read_bytes() == LARGE


@pytest.mark.parametrize("etag", ["../../../evil", "a/b", "..", ""])
def test_gg14_an_etag_cannot_lead_out_of_the_cache(
    server: HubServer, hub: Hub, etag: str, tmp_path: Path
) -> None:
    server.etags[MODEL] = etag or '""'
    with pytest.raises(DownloadError, match="makes no sense"):
        pull(REPO, hub=hub)
    assert not server.downloads()
    assert not list(tmp_path.rglob("*evil*"))


def test_gg14_a_commit_cannot_lead_out_of_the_cache(server: HubServer, hub: Hub, tmp_path: Path) -> None:
    server.commit = "../../evil"
    with pytest.raises(DownloadError, match="makes no sense"):
        pull(REPO, hub=hub)
    assert not list(tmp_path.rglob("*evil*"))


def test_the_token_does_not_follow_to_another_server(
    server: HubServer, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with HubServer({MODEL: LARGE}) as storage:
        server.storage = storage
        assert pull(REPO, hub=hub).read_bytes() == LARGE
    assert set(server.tokens) == {"Bearer hf_secret"}
    assert storage.tokens == [None]


def test_what_killed_downloads_left_is_removed_and_nothing_else(
    server: HubServer, hub: Hub, blobs: Path
) -> None:
    listed, gone = "0" * 64, "1" * 64
    server.files["Other-Q8_0.gguf"] = b"other"
    server.listed["Other-Q8_0.gguf"] = 5
    old = [f"{gone}.incomplete", f"{gone}.1234abcd.incomplete", "tmp_123", f"{listed}.1234abcd.incomplete"]
    resumable = f"{digest_of(b'other')}.incomplete"
    for name in [*old, resumable, "young.incomplete", "whole", "busy.12345678.incomplete"]:
        (blobs / name).write_bytes(b"left")
        if name != "young.incomplete":
            os.utime(blobs / name, (0, time.time() - IDLE_S - 1))
    holder = (
        "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print('held'); input()"
    )
    lock = hub.folder() / ".locks" / FOLDER / "busy.lock"
    lock.parent.mkdir(parents=True)
    command = [sys.executable, "-c", holder, str(lock)]
    notes: list[str] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.read(4) == "held"
        pull(REPO, hub=hub, notice=notes.append)
        other.kill()
    kept = {resumable, "young.incomplete", "whole", "busy.12345678.incomplete"}
    assert {path.name for path in blobs.iterdir()} == {digest_of(LARGE)} | kept
    assert notes == [f"{REPO}: removed 16 bytes that interrupted downloads left"]


@pytest.mark.sharded(of="processes")
def test_a_download_of_another_process_is_waited_for(server: HubServer, hub: Hub, blobs: Path) -> None:
    server.stall_after = CHUNK_BYTES + 1000
    waiting = threading.Event()
    with _command(server, hub) as first:
        assert first.stderr is not None
        assert any(" 40 % " in line for line in first.stderr)
        notes: list[str] = []

        def hear(note: str) -> None:
            notes.append(note)
            waiting.set()

        second = threading.Thread(target=partial(pull, REPO, hub=hub, notice=hear))
        second.start()
        assert waiting.wait(60)
        assert server.downloads() == [(f"/{REPO}/resolve/main/{MODEL}", None)]
        first.kill()
        second.join()
    assert notes[0] == f"{MODEL}: waiting for another process that downloads it"
    assert starts(server) == [0, CHUNK_BYTES]
    assert resolve_model(REPO, hub=hub, offline=True).read_bytes() == LARGE


def test_no_room_is_said_before_anything_comes(
    server: HubServer, hub: Hub, blobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (blobs / f"{digest_of(LARGE)}.incomplete").write_bytes(LARGE[:71])
    monkeypatch.setattr("coldstream.gguf.hub_download.free_bytes", lambda folder: len(LARGE) - 72)
    need, free = f"{len(LARGE) - 71:,}", f"{len(LARGE) - 72:,}"
    with pytest.raises(
        StorageError, match=rf"{MODEL}: {need} bytes are to come, {free} are free in .*HF_HOME"
    ):
        pull(REPO, hub=hub)
    assert not server.downloads()
    monkeypatch.setattr("coldstream.gguf.hub_download.free_bytes", lambda folder: len(LARGE) - 71)
    assert pull(REPO, hub=hub).read_bytes() == LARGE


def test_room_is_looked_for_again_before_each_file(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs write too."""
    first, second = (f"Tiny-Q4_K_M-0000{number}-of-00002.gguf" for number in (1, 2))
    free = [100, 100, 49]
    monkeypatch.setattr("coldstream.gguf.hub_download.free_bytes", lambda folder: free.pop(0))
    with HubServer({first: b"a" * 50, second: b"b" * 50}) as server:
        full = Hub(cache_dir=hub.folder(), endpoint=server.endpoint)
        with pytest.raises(StorageError, match=rf"{second}: 50 bytes are to come, 49 are free"):
            pull(REPO, hub=full)
        assert [path.rpartition("/")[2] for path, _ in server.downloads()] == [first]


@pytest.mark.sharded(of="processes")
def test_a_disk_that_fills_up_meanwhile(server: HubServer, hub: Hub, blobs: Path) -> None:
    limit = CHUNK_BYTES + 5
    limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    with _command(server, hub, preexec_fn=limited) as process:
        shown, notes = process.communicate()
    assert (process.returncode, shown) == (73, "")
    assert f"error: {MODEL}: File too large in {blobs}: " in notes.replace("\n", "")
    assert " bytes are to come, " in notes
    assert "Traceback" not in notes
    assert not list_cached(hub)
    assert [path.name for path in blobs.iterdir()] == [f"{digest_of(LARGE)}.incomplete"]
    assert pull(REPO, hub=hub).read_bytes() == LARGE
    assert starts(server)[0] == 0
    assert starts(server)[1] >= CHUNK_BYTES


def test_a_cache_that_cannot_be_written(server: HubServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="Not a directory: let HF_HOME be a folder that you may write to"):
        pull(REPO, hub=Hub(tmp_path / "file" / "cache", server.endpoint))


@pytest.mark.sharded
@pytest.mark.parametrize("streams", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_pull_goes_on_when_its_output_is_closed(
    server: HubServer, hub: Hub, streams: tuple[str, ...]
) -> None:
    reader, closed = os.pipe()
    os.close(reader)
    with _command(server, hub, **dict.fromkeys(streams, closed)) as process:
        os.close(closed)
        _, notes = process.communicate()
    assert process.returncode == 141
    assert "Traceback" not in (notes or "")


@pytest.mark.sharded(of="processes")
def test_huggingface_hub_that_is_offline_says_so(
    server: HubServer, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with _command(server, hub) as process:
        _, notes = process.communicate()
    assert process.returncode == 69
    assert f"error: {REPO}: huggingface_hub is offline: unset HF_HUB_OFFLINE to download" in notes
    assert not server.requests
