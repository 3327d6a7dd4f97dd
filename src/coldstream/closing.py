"""What a `with` block closes at its end."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Has a `close`, which the end of a `with` block calls, whether it raises or not."""

    @abstractmethod
    def close(self) -> None:
        """Frees what this holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
