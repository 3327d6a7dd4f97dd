"""Model names → files on this machine, by way of the Hugging Face cache that other tools share.

Unit of work: one name. A name is a path, or `org/repo[:QUANT]`; what is cached needs no network. Knows
nothing of what is inside the files. Downloading, the layout of the cache and tokens are the matter of
`huggingface_hub`, which is imported only when a hub name is used: it writes a file under a temporary name and
moves it when it is whole.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from coldstream.errors import DownloadError, ModelNotFoundError
from coldstream.gguf.hub_files import (
    SUFFIX,
    HubName,
    ModelFiles,
    check_relative,
    choose,
    choose_only,
    group_models,
)

# Called with a file's name, its bytes so far and its size in bytes.
Progress = Callable[[str, int, int], None]

TIMEOUT_S = 15.0
_COMMIT = re.compile(r"[0-9a-f]{40}")


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


def resolve_model(
    name: str, *, offline: bool = False, progress: Progress | None = None, hub: Hub | None = None
) -> Path:
    """The first file of the model called `name`: a path, or a hub name, downloaded unless it is cached.

    A folder must hold exactly one model. Raises `ModelNotFoundError` when there is no such model or several,
    also when `offline` and it isn't cached, and `DownloadError` when the hub can't be reached or refuses.
    """
    if local := _local_model(name):
        return local
    hub_name = HubName.parse(name)
    if hub_name is None or (name.lower().endswith(SUFFIX) and ":" not in name):
        raise ModelNotFoundError(f"{name}: no such file; a model of the hub is written org/repo[:QUANT]")
    hub = hub or Hub()
    snapshot = _snapshot(_repo_folder(hub, hub_name.repo))
    try:
        cached = choose(hub_name, _models_below(snapshot))
    except ModelNotFoundError as error:
        if offline:
            raise ModelNotFoundError(f"not in the cache: {error}; run `coldstream pull {name}`") from None
        return pull(name, progress=progress, hub=hub)
    return snapshot / cached.files[0]


def _local_model(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            models = group_models(entry.name for entry in path.iterdir())
            return path / choose_only(name, models).files[0]
        return path if path.exists() else None
    except (OSError, RuntimeError) as error:  # no permission, a name too long, an unknown user after ~
        raise ModelNotFoundError(f"{name}: {error}") from None


def pull(name: str, *, progress: Progress | None = None, hub: Hub | None = None) -> Path:
    """Download what is missing of `org/repo[:QUANT]` as it is on the hub now; returns its first file.

    Raises `ModelNotFoundError` when the hub has no such model, `DownloadError` when it can't be reached,
    refuses, or delivers something else than it lists. Nothing half-written stays behind.
    """
    hub_name = HubName.parse(name)
    if hub_name is None:
        raise ModelNotFoundError(f"{name}: a model of the hub is written org/repo[:QUANT]")
    hub = hub or Hub()
    with _hub_errors(hub_name.repo):
        sizes = _list_files(hub, hub_name.repo)
        model = choose(hub_name, group_models(sizes))
        paths = [_download(hub, hub_name.repo, file, sizes[file], progress) for file in model.files]
    if len({path.parent for path in paths}) != 1:
        raise DownloadError(f"{hub_name.repo} changed during the download: pull it again")
    return paths[0]


def list_cached(hub: Hub | None = None) -> list[CachedModel]:
    """Every complete model in the cache, sorted by name. Needs no network."""
    cached = []
    for folder in sorted((hub or Hub()).folder().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = _snapshot(folder)
        for model in _models_below(snapshot):
            if model.complete:
                cached.append(_describe(repo, model, snapshot))
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


def _repo_folder(hub: Hub, repo: str) -> Path:
    from huggingface_hub.file_download import repo_folder_name

    return hub.folder() / repo_folder_name(repo_id=repo, repo_type="model")


def _snapshot(repo_folder: Path) -> Path:
    """The folder of the files that `main` named when it was last asked for; it need not exist."""
    try:
        commit = (repo_folder / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    return repo_folder / "snapshots" / (commit if _COMMIT.fullmatch(commit) else "none")


def _models_below(snapshot: Path) -> list[ModelFiles]:
    files = (path for path in snapshot.rglob("*") if path.suffix.lower() == SUFFIX and path.is_file())
    return group_models(path.relative_to(snapshot).as_posix() for path in files)


def _list_files(hub: Hub, repo: str) -> dict[str, int]:
    """Size in bytes of every file of a repository by its path, none of which leads out of it."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=hub.endpoint)
    try:
        files = api.model_info(repo, files_metadata=True, timeout=TIMEOUT_S).siblings or []
        sizes = {str(file.rfilename): int(file.size or 0) for file in files}
    except (LookupError, TypeError, AttributeError) as error:
        raise DownloadError(f"{repo}: the hub's list of files makes no sense: {error!r}") from error
    for path in sizes:
        check_relative(path)
    return sizes


def _download(hub: Hub, repo: str, file: str, size: int, progress: Progress | None) -> Path:
    from huggingface_hub import hf_hub_download

    path = Path(
        hf_hub_download(
            repo,
            file,
            cache_dir=hub.folder(),
            endpoint=hub.endpoint,
            tqdm_class=_bar_class(file, size, progress),
        )
    )
    if path.stat().st_size != size:
        raise DownloadError(f"{repo}/{file}: {path.stat().st_size} bytes, listed as {size}: pull it again")
    if progress is not None:
        progress(file, size, size)
    return path


def _bar_class(file: str, size: int, progress: Progress | None) -> type:
    """A stand-in for the progress bar of `huggingface_hub`, which wants a class to make one from."""

    class Bar:
        def __init__(self, initial: int = 0, **options: Any) -> None:
            self.done = initial

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *error: object) -> None: ...

        def update(self, num_bytes: int = 1) -> None:
            self.done += num_bytes
            if progress is not None:
                progress(file, self.done, size)

        def update_transfer(self, num_bytes: int) -> None:
            """Bytes on the wire, which are counted again as bytes of the file."""

        def set_postfix_str(self, *text: object, **options: object) -> None: ...

        def set_transfer_postfix_str(self, *text: object, **options: object) -> None: ...

        def close(self) -> None: ...

    return Bar


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Everything that `huggingface_hub` raises, as one of ours."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 404:
            raise ModelNotFoundError(f"{repo}: the hub has no such repository or file") from error
        private = status in (401, 403)
        advice = "private, gated or misspelt; see `hf auth login`" if private else "try again later"
        raise DownloadError(f"{repo}: the hub answered {status}: {advice}") from error
    except (errors.XetDownloadError, OSError, ValueError, RuntimeError) as error:
        raise DownloadError(f"{repo}: download failed: {error or type(error).__name__}") from error
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # its HTTP library's, whichever that is
        raise DownloadError(f"{repo}: download failed: {error or type(error).__name__}") from error
