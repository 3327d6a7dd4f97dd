"""One file of the hub → one whole, checked file in the cache.

`huggingface_hub` says where a file is, opens connections, and gives the file its name in the cache. Its own
download starts from nothing after its process was killed (docs/notes/hub.md). Here the part so far is kept as
`blobs/ETAG.incomplete` and continued by the next attempt. It becomes `blobs/ETAG` once its size and digest
are those of the hub. Knows nothing of models.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from coldstream.errors import DownloadError, StorageError
from coldstream.files import free_bytes, sync_folder

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from httpx2 import Response

# Called with a file's name, its bytes so far and its size in bytes.
Progress = Callable[[str, int, int], None]
# Called with one line of text.
Notice = Callable[[str], None]

TIMEOUT_S = 15.0
LOCK_PATIENCE_S = 0.5  # seconds of waiting before a message about it
# A file without a write for so long has no owner, even where locks don't work.
IDLE_S = 3600.0
HASH_CHUNK_BYTES = 1 << 24
_CHUNK_BYTES: Final = 10 << 20  # bytes that are written at once
_MAX_RETRIES: Final = 5  # requests in a row without a new byte
_RETRY_S: Final = 1.0  # before each of them; for a busy hub twice as long each time
_RETRIED_STATUS: Final = (408, 429)  # of a hub that is busy
_MAX_RETRY_AFTER_S: Final = 300.0  # longest wait that the hub may ask for
_RATE_LIMIT: Final = re.compile(r"\br=0;t=(\d+)")  # "api";r=0;t=55: nothing is left for 55 seconds

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[\w-]{1,128}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class ListedFile:
    """An entry of the hub's list of files. `sha256` is None for a file that is stored in git itself."""

    num_bytes: int
    sha256: str | None


@dataclass(frozen=True)
class RemoteFile:
    """A file of the hub at one commit. `digest` is its SHA-256, or git's SHA-1 of it, or unknown."""

    repo: str
    name: str
    url: str
    num_bytes: int
    etag: str
    commit: str
    digest: str | None

    @classmethod
    def ask(cls, repo: str, name: str, listed: ListedFile, endpoint: str | None) -> "RemoteFile":
        """Asks the hub for the file's present state. Raises DownloadError if it contradicts the list."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(repo, name, endpoint=endpoint)
        said = get_hf_file_metadata(url, timeout=TIMEOUT_S)
        # Both become names in the cache.
        commit, etag = said.commit_hash or "", said.etag or ""
        if not _COMMIT.fullmatch(commit) or not _ETAG.fullmatch(etag):
            raise DownloadError(f"{repo}/{name}: the hub's description makes no sense: {str(said)[:100]}")
        if said.size is not None and said.size != listed.num_bytes:
            problem = f"{said.size} bytes, listed as {listed.num_bytes}"
            raise DownloadError(f"{repo}/{name}: {problem}: pull it again")
        digest = etag if _DIGEST.fullmatch(etag) else listed.sha256
        return cls(repo, name, url, listed.num_bytes, etag, commit, digest)

    def problem(self, path: Path, progress: Progress) -> str | None:
        """How the file at `path` differs from this one; None if it doesn't. Reads all of it."""
        num_bytes = path.stat().st_size
        if num_bytes != self.num_bytes:
            return f"{num_bytes} bytes, the hub lists {self.num_bytes}"
        if self.digest is None:
            return None
        name, digest = "SHA-256", hashlib.sha256()
        if len(self.digest) == 40:
            name, digest = "SHA-1", hashlib.sha1(f"blob {num_bytes}\0".encode(), usedforsecurity=False)
        with open(path, "rb") as file:
            while chunk := file.read(HASH_CHUNK_BYTES):
                digest.update(chunk)
                progress(f"checking {self.name}", file.tell(), num_bytes)
        found = digest.hexdigest()
        return None if found == self.digest else f"{name} {found[:12]}…, the hub lists {self.digest[:12]}…"


class RepoFolder:
    """The folder of one repository in the cache, which may not exist yet."""

    def __init__(self, cache: Path, repo: str) -> None:
        name = f"models--{repo.replace('/', '--')}"
        self.path = cache / name
        self.blobs = self.path / "blobs"
        self._locks = cache / ".locks" / name

    def snapshot(self) -> Path:
        """The folder of the files that `main` named when it was last asked for; it need not exist."""
        try:
            commit = (self.path / "refs" / "main").read_text().strip()
        except (OSError, UnicodeDecodeError):
            commit = ""
        return self.path / "snapshots" / (commit if _COMMIT.fullmatch(commit) else "none")

    def copies(self, remote: RemoteFile) -> list[Path]:
        """Where the cache has the file, whole or damaged."""
        linked = self.path / "snapshots" / remote.commit / remote.name
        # On a file system without links the file itself is there.
        copies = [] if linked.is_symlink() else [linked]
        return [path for path in (self.blobs / remote.etag, *copies) if path.is_file()]

    def part(self, remote: RemoteFile) -> Path:
        """The path of the downloaded part of the file."""
        return self.blobs / f"{remote.etag}.incomplete"

    def missing_bytes(self, remote: RemoteFile) -> int:
        """Bytes of the file that are still to be downloaded."""
        part = self.part(remote)
        if self.copies(remote):
            return 0
        return max(0, remote.num_bytes - (part.stat().st_size if part.is_file() else 0))

    def require_space(self, remotes: Iterable[RemoteFile]) -> None:
        """Raises StorageError unless what is missing of all these fits onto the disk."""
        self.blobs.mkdir(parents=True, exist_ok=True)
        missing = {remote.name: self.missing_bytes(remote) for remote in remotes}
        need, free = sum(missing.values()), free_bytes(self.blobs)
        if free is not None and need > free:
            raise StorageError(
                f"{next(name for name, count in missing.items() if count)}: {need:,} bytes are to come, "
                f"{free:,} are free in {self.blobs}: free some, or let HF_HOME be a folder on another disk"
            )

    @contextmanager
    def locked(self, etag: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the lock that every download to this cache holds, other tools' too.

        If another process has it, call `waiting` and wait; without `waiting` raise `filelock.Timeout`.
        """
        from filelock import Timeout

        self._locks.mkdir(parents=True, exist_ok=True)
        path = self._locks / f"{etag}.lock"
        try:
            lock = _acquired(path, LOCK_PATIENCE_S)
        except Timeout:
            if waiting is None:
                raise
            waiting()
            lock = _acquired(path, -1)
        try:
            yield
        finally:
            with suppress(OSError):
                lock.release()

    def clean_up(self, resumable: Iterable[str]) -> int:
        """Remove leftovers of killed downloads that cannot be continued; returns their bytes.

        What is kept: anything touched within the last hour or under a lock, as it may be another process's,
        and the parts of files whose digests are `resumable`.
        """
        from filelock import Timeout

        kept = {f"{etag}.incomplete" for etag in resumable}
        left = [*self.blobs.glob("*.incomplete"), *self.blobs.glob("tmp_*")]
        left += [*self.path.glob("tmp_*"), *(self.path / "refs").glob("*.tmp")]
        freed = 0
        for path in left:
            with suppress(FileNotFoundError, Timeout):
                status = path.stat()
                if path.name not in kept and time.time() - status.st_mtime > IDLE_S:
                    with self.locked(path.name.split(".")[0]):
                        path.unlink()
                        freed += status.st_size
        return freed


def _acquired(path: Path, timeout_s: float) -> "BaseFileLock":
    """The lock at `path`, which others may wait for who share the cache; a negative timeout waits for ever.

    Raises `filelock.Timeout`.
    """
    from filelock import FileLock, SoftFileLock

    lock: BaseFileLock = FileLock(path, timeout=timeout_s, mode=0o664)
    try:
        lock.acquire()
    except NotImplementedError:  # this file system has no locks
        lock = SoftFileLock(path, timeout=timeout_s, mode=0o664)
        lock.acquire()
    return lock


def fetch(folder: RepoFolder, remote: RemoteFile, progress: Progress, notice: Notice) -> None:
    """Make the blob of `remote` whole: check it, download what is missing of it, or repair it.

    Raises DownloadError, StorageError and errors of `huggingface_hub`; the part so far then stays for the
    next attempt, under a name that no program takes for a whole file.
    """

    def waiting() -> None:
        notice(f"{remote.name}: waiting for another process that downloads it")

    if remote.digest is None:
        notice(f"{remote.name}: the hub gives no digest of it, so that only its size is checked")
    folder.blobs.mkdir(parents=True, exist_ok=True)
    with folder.locked(remote.etag, waiting):
        problems = {path: remote.problem(path, progress) for path in folder.copies(remote)}
        for path, problem in problems.items():
            if problem:
                notice(f"{remote.name} is damaged ({problem}): repairing it")
                path.unlink()
        if None not in problems.values():
            _fetch_blob(folder, remote, progress, notice)
        if any(problems.values()):
            notice(f"{remote.name} is repaired")


def _fetch_blob(folder: RepoFolder, remote: RemoteFile, progress: Progress, notice: Notice) -> None:
    from huggingface_hub import constants

    folder.require_space([remote])
    if remote.num_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
        # Left to `hf_hub_download` and its other transfer.
        notice(f"{remote.name}: so large a file starts from nothing if it is interrupted")
        return
    part = folder.part(remote)
    _fetch_part(part, remote, progress, notice)
    os.replace(part, folder.blobs / remote.etag)
    sync_folder(folder.blobs)


def _fetch_part(part: Path, remote: RemoteFile, progress: Progress, notice: Notice) -> None:
    """Complete `part`. The present part is continued, and discarded only if the result is wrong."""
    size = part.stat().st_size if part.is_file() else 0
    if size > remote.num_bytes:
        part.unlink()
        size = 0
    if size:
        notice(f"{remote.name}: going on at {size:,} of {remote.num_bytes:,} bytes")
    _transfer(part, remote, progress)
    problem = remote.problem(part, progress)
    if problem and size:
        notice(f"{remote.name}: what was there was damaged ({problem}): starting again")
        part.unlink()
        _transfer(part, remote, progress)
        problem = remote.problem(part, progress)
    if problem:
        part.unlink()
        raise DownloadError(f"{remote.repo}/{remote.name}: what came is damaged: {problem}: pull it again")


def _transfer(part: Path, remote: RemoteFile, progress: Progress) -> None:
    """Appends to `part` what is missing, as long as the hub gives any; then brings it to the disk.

    The result may be too short or too long, which the check of the file reports.
    """
    from httpx2 import TransportError

    num_retries = 0
    try:
        with _storage_errors(part, remote), open(part, "ab") as file:
            while file.tell() < remote.num_bytes:
                start, wait_s = file.tell(), 0.0
                try:
                    with _response(remote, start) as response:
                        wait_s = _wait_s(response, num_retries)
                        if not wait_s:
                            _append(response, file, part, remote, progress)
                            break
                except TransportError:
                    num_retries = 0 if file.tell() != start else num_retries
                    if num_retries == _MAX_RETRIES:
                        raise
                    wait_s = _RETRY_S
                num_retries += 1
                time.sleep(wait_s)
            os.fsync(file.fileno())
    finally:
        if part.is_file() and part.stat().st_size == 0:
            part.unlink()


@contextmanager
def _response(remote: RemoteFile, start: int) -> Iterator["Response"]:
    """The hub's answer with the bytes from `start` on."""
    from huggingface_hub import constants, get_session, get_token

    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    if (token := get_token()) and not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        headers["Authorization"] = f"Bearer {token}"  # which is not sent on to another server
    with get_session().stream(
        "GET",
        remote.url,
        headers=headers,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        follow_redirects=True,
    ) as response:
        yield response


def _wait_s(response: "Response", num_retries: int) -> float:
    """Seconds to wait before asking a busy hub again; 0.0: not at all. Raises HfHubHTTPError."""
    from huggingface_hub import hf_raise_for_status

    if response.status_code not in _RETRIED_STATUS or num_retries == _MAX_RETRIES:
        hf_raise_for_status(response)
        return 0.0
    reset = _RATE_LIMIT.search(response.headers.get("RateLimit", ""))
    given = reset[1] if reset else response.headers.get("Retry-After", "")
    if given.isdecimal():  # a second more, as both count whole ones
        return min(float(given) + 1, _MAX_RETRY_AFTER_S)
    return _RETRY_S * float(2**num_retries)


def _append(response: "Response", file: BinaryIO, part: Path, remote: RemoteFile, progress: Progress) -> None:
    """Appends what the hub sends to `file`, at most a chunk too many, and reports each write."""
    if response.status_code != 206 and file.tell():  # it sends all of it again
        file.seek(0)
        file.truncate()
    for chunk in response.iter_bytes(_CHUNK_BYTES):
        with _storage_errors(part, remote):
            file.write(chunk)
            file.flush()
        progress(remote.name, file.tell(), remote.num_bytes)
        if file.tell() > remote.num_bytes:
            return


@contextmanager
def _storage_errors(part: Path, remote: RemoteFile) -> Iterator[None]:
    """Raises errors of the disk as StorageError. Errors of the network have no errno."""
    try:
        yield
    except OSError as error:
        # A broken pipe is an error of the caller's `progress`.
        if error.errno is None or _is_http(error) or isinstance(error, BrokenPipeError):
            raise
        done = part.stat().st_size if part.is_file() else 0
        need, free = remote.num_bytes - done, free_bytes(part.parent) or 0
        raise StorageError(
            f"{remote.name}: {error.strerror} in {part.parent}: {need:,} bytes are to come, {free:,} free: "
            "free some and pull again, which goes on from here"
        ) from error


def _is_http(error: Exception) -> bool:
    from huggingface_hub import errors

    return isinstance(error, errors.HfHubHTTPError)
