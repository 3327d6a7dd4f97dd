"""Model names → files on this machine, by way of the Hugging Face cache that other tools share.

Unit of work: one name. A name is a path, or `org/repo[:QUANT]`, also as the address of its page; what is
cached needs no network. Knows nothing of what is inside the files. The layout of the cache and tokens are the
matter of `huggingface_hub`, which is imported only when a hub name is used; how a file gets there whole, of
`hub_download.py`. Errors of `huggingface_hub` become coldstream's, with the next step.
"""

import difflib
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from coldstream.errors import DownloadError, ModelNotFoundError, StorageError
from coldstream.gguf.hub_download import (
    TIMEOUT_S,
    ListedFile,
    Notice,
    Progress,
    RemoteFile,
    RepoFolder,
    fetch,
)
from coldstream.gguf.hub_files import (
    SUFFIX,
    HubName,
    ModelFiles,
    check_relative,
    choose,
    choose_only,
    choose_sidecar,
    group_models,
)

_FOR_CACHE = "let HF_HOME be a folder that you may write to"


@contextmanager
def hub_errors(repo: str, similar: Callable[[], list[str]]) -> Iterator[None]:
    """Translates errors about `repo`. `similar` returns names that may have been meant.

    Broken pipes are passed on: they are errors of the caller's `progress`.
    """
    from filelock import Timeout
    from httpx2 import HTTPError
    from huggingface_hub import errors

    try:
        yield
    except BrokenPipeError:
        raise
    except errors.HfHubHTTPError as error:
        raise _refusal(repo, error.response.status_code, similar) from error
    except errors.OfflineModeIsEnabled as error:
        advice = "unset HF_HUB_OFFLINE to download; what is in the cache runs with --offline"
        raise DownloadError(f"{repo}: huggingface_hub is offline: {advice}") from error
    except (OSError, Timeout) as error:
        if getattr(error, "filename", None):
            raise StorageError(f"{error.filename}: {error.strerror}: {_FOR_CACHE}") from error
        raise _failure(repo, error) from error
    except (errors.XetDownloadError, ValueError, RuntimeError) as error:
        raise _failure(repo, error) from error
    except HTTPError as error:
        raise _failure(repo, error) from error


def _refusal(repo: str, status: int, similar: Callable[[], list[str]]) -> ModelNotFoundError | DownloadError:
    if status not in (401, 403, 404):
        return DownloadError(f"{repo}: the hub answered {status}: try again later")
    names = similar()
    meant = f"; did you mean {' or '.join(names)}?" if names else ""
    if status == 404:
        return ModelNotFoundError(f"{repo}: the hub has no such repository or file{meant}")
    advice = "private, gated or misspelt; accept its terms on its page, and see `hf auth login`"
    return DownloadError(f"{repo}: the hub answered {status}: {advice}{meant}")


def _failure(repo: str, error: Exception) -> DownloadError:
    reason = str(error) or type(error).__name__
    advice = "check the network and try again, which goes on from what came; what is in the cache runs with"
    return DownloadError(f"{repo}: download failed: {reason[:200]}: {advice} --offline")


MAX_REPOS = 1000  # repositories of an owner that a misspelt name is compared with


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache. `name` is what to give to `resolve_model`; `paths` are its files in order."""

    name: str
    quant: str | None
    paths: tuple[Path, ...]
    num_bytes: int
    modified: datetime


@dataclass(frozen=True)
class Hub:
    """Where models come from and are kept. The defaults are those of `huggingface_hub`."""

    cache_dir: Path | None = None
    endpoint: str | None = None

    def folder(self) -> Path:
        """The cache, which may not exist yet."""
        from huggingface_hub import constants

        return self.cache_dir or Path(constants.HF_HUB_CACHE)


def check_name(name: str) -> Path | HubName:
    """The file that `name` is the path of, or a name of the hub, which is not asked.

    Raises `ModelNotFoundError` for what is neither, and for a folder without a single model.
    """
    if local := _local_model(name):
        return local
    hub_name = HubName.parse(name)
    if hub_name is None or (hub_name.quant is None and hub_name.repo.lower().endswith(SUFFIX)):
        raise ModelNotFoundError(f"{name}: no such file; a model of the hub is written org/repo[:QUANT]")
    return hub_name


def resolve_model(
    name: str, *, offline: bool = False, progress: Progress | None = None, hub: Hub | None = None
) -> Path:
    """The first file of the model called `name`: a path, or a hub name, downloaded unless it is cached.

    A folder must hold exactly one model. Raises `ModelNotFoundError` when there is no such model or several,
    also when `offline` and it isn't cached, and `DownloadError` when the hub can't be reached or refuses.
    """
    hub_name = check_name(name)
    if isinstance(hub_name, Path):
        return hub_name
    hub = hub or Hub()
    snapshot = RepoFolder(hub.folder(), hub_name.repo).snapshot()
    try:
        cached = choose(hub_name, _models_below(snapshot, named=hub_name.quant))
    except ModelNotFoundError as error:
        if offline:
            problem = _why_not_cached(hub_name, snapshot, error)
            raise ModelNotFoundError(f"{problem}; run `coldstream pull {name}`") from None
        return pull(name, progress=progress, hub=hub)
    return snapshot / cached.files[0]


def resolve_sidecar(
    name: str, *, offline: bool = False, progress: Progress | None = None, hub: Hub | None = None
) -> Path | None:
    """The file of a block for multi-token prediction beside a cached model of the hub; None without one.

    It is the one that llama.cpp takes (`choose_sidecar`), downloaded unless one is cached. Raises
    `DownloadError` when the hub can't be reached or refuses.
    """
    hub_name = HubName.parse(name)
    if hub_name is None or _local_model(name):
        return None
    hub = hub or Hub()
    snapshot = RepoFolder(hub.folder(), hub_name.repo).snapshot()
    model = choose(hub_name, _models_below(snapshot, named=hub_name.quant))
    if cached := choose_sidecar(model, _files_below(snapshot)):
        return snapshot / cached
    if offline:
        return None
    with hub_errors(hub_name.repo, partial(_similar, hub, hub_name.repo)):
        listed = choose_sidecar(model, _list_files(hub, hub_name.repo))
    return pull(f"{hub_name.repo}:{listed}", progress=progress, hub=hub) if listed else None


def _why_not_cached(name: HubName, snapshot: Path, error: ModelNotFoundError) -> str:
    try:
        named = choose(name, _models_below(snapshot, with_vanished=True))
    except ModelNotFoundError:
        return f"not in the cache: {error}"
    gone = next(file for file in named.files if not _has_bytes(snapshot / file))
    return f"{name.repo}: the cache names {gone}, but its bytes are gone"


def _local_model(name: str) -> Path | None:
    try:
        path = Path(name)
        if name.startswith("~") and not path.exists():
            path = path.expanduser()
        if path.is_dir():
            models = group_models(entry.name for entry in path.iterdir())
            return path / choose_only(name, models).files[0]
        return path if path.exists() else None
    except (OSError, RuntimeError) as error:  # no permission, a name too long, an unknown user after ~
        raise ModelNotFoundError(f"{name}: {error}") from None


def pull(
    name: str, *, progress: Progress | None = None, notice: Notice | None = None, hub: Hub | None = None
) -> Path:
    """Make `org/repo[:QUANT]` whole as it is on the hub now; returns its first file.

    Cached files are read and checked against the hub's digests; damaged or missing ones are downloaded, and
    parts of earlier attempts are continued. `notice` is called with what was found and done. Raises
    `ModelNotFoundError` when the hub has no such model, and `StorageError` when the disk is full. Raises
    `DownloadError` when the hub can't be reached, refuses, or delivers something else than it lists.
    """
    hub_name = HubName.parse(name)
    if hub_name is None:
        raise ModelNotFoundError(f"{name}: a model of the hub is written org/repo[:QUANT]")
    hub = hub or Hub()
    repo = hub_name.repo
    progress, notice = progress or _ignore, notice or _ignore
    with hub_errors(repo, partial(_similar, hub, repo)):
        listed = _list_files(hub, repo)
        model = choose(hub_name, group_models(listed, hub_name.quant))
        remotes = [RemoteFile.ask(repo, file, listed[file], hub.endpoint) for file in model.files]
        folder = RepoFolder(hub.folder(), repo)
        if freed := folder.clean_up(file.sha256 for file in listed.values() if file.sha256):
            notice(f"{repo}: removed {freed:,} bytes that interrupted downloads left")
        folder.require_space(remotes)
        paths = [_download(hub, folder, remote, progress, notice) for remote in remotes]
    if len({path.parent for path in paths}) != 1:
        raise DownloadError(f"{repo} changed during the download: pull it again")
    return paths[0]


def list_cached(hub: Hub | None = None) -> list[CachedModel]:
    """Every complete model in the cache, sorted by name. Needs no network."""
    cached = []
    for path in sorted((hub or Hub()).folder().glob("models--*--*")):
        snapshot = RepoFolder(path.parent, _repo_of(path)).snapshot()
        for model in _models_below(snapshot):
            if model.complete:
                with suppress(FileNotFoundError):  # removed meanwhile
                    cached.append(_describe(_repo_of(path), model, snapshot))
    return cached


def _describe(repo: str, model: ModelFiles, snapshot: Path) -> CachedModel:
    paths = tuple(snapshot / file for file in model.files)
    stats = [path.stat() for path in paths]
    return CachedModel(
        name=f"{repo}:{model.quant or model.files[0]}",
        quant=model.quant,
        paths=paths,
        num_bytes=sum(stat.st_size for stat in stats),
        modified=datetime.fromtimestamp(max(stat.st_mtime for stat in stats)).astimezone(),
    )


def _models_below(snapshot: Path, with_vanished: bool = False, named: str | None = None) -> list[ModelFiles]:
    """The models of a snapshot, and the file that is `named`; `with_vanished` also those of links that lead
    nowhere.
    """
    return group_models(_files_below(snapshot, with_vanished), named)


def _files_below(snapshot: Path, with_vanished: bool = False) -> Iterator[str]:
    """The GGUF files of a snapshot, as paths in the repository."""
    paths = (path for path in snapshot.rglob("*") if path.suffix.lower() == SUFFIX)
    return (path.relative_to(snapshot).as_posix() for path in paths if with_vanished or _has_bytes(path))


def _has_bytes(path: Path) -> bool:
    """Whether the file is not empty, as after a loss of power."""
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _list_files(hub: Hub, repo: str) -> dict[str, ListedFile]:
    """The hub's list of a repository's files by path, none of which leads out of it."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=hub.endpoint)
    try:
        files = api.model_info(repo, files_metadata=True, timeout=TIMEOUT_S).siblings or []
        listed = {
            str(file.rfilename): ListedFile(int(file.size or 0), str(file.lfs.sha256) if file.lfs else None)
            for file in files
        }
    except (LookupError, TypeError, AttributeError) as error:
        raise DownloadError(f"{repo}: the hub's list of files makes no sense: {error!r}") from error
    for path in listed:
        check_relative(path)
    return listed


def _download(hub: Hub, folder: RepoFolder, remote: RemoteFile, progress: Progress, notice: Notice) -> Path:
    """Make the file whole, and let `huggingface_hub` give it its name in the cache."""
    from huggingface_hub import hf_hub_download

    fetch(folder, remote, progress, notice)
    path = Path(hf_hub_download(remote.repo, remote.name, cache_dir=hub.folder(), endpoint=hub.endpoint))
    if path.stat().st_size != remote.num_bytes:
        problem = f"{path.stat().st_size} bytes, listed as {remote.num_bytes}"
        raise DownloadError(f"{remote.repo}/{remote.name}: {problem}: pull it again")
    progress(remote.name, remote.num_bytes, remote.num_bytes)
    return path


def _similar(hub: Hub, repo: str) -> list[str]:
    """Repositories with names like `repo`: of the same owner on the hub, and in the cache."""
    from httpx2 import HTTPError
    from huggingface_hub import HfApi

    owner = repo.split("/")[0]
    names = {_repo_of(folder) for folder in hub.folder().glob("models--*--*")}
    # Without the hub's list, only names in the cache are suggested.
    with suppress(HTTPError, OSError, ValueError, LookupError, TypeError):
        listed = HfApi(endpoint=hub.endpoint).list_models(author=owner, limit=MAX_REPOS)
        names |= {str(model.id) for model in listed}
    return difflib.get_close_matches(repo, sorted(names - {repo}), n=3, cutoff=0.7)


def _repo_of(folder: Path) -> str:
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def _ignore(*_: object) -> None:
    """For callers that show no progress."""
