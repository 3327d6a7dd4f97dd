"""Translates errors of `huggingface_hub` into coldstream's, with the next step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coldstream.errors import DownloadError, ModelNotFoundError, StorageError

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
