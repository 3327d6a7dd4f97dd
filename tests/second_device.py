"""A second GPU on the host, whose kernels run while those of the first do."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from host_device import HostDevice


class SecondDevice(HostDevice):
    """One that compiles nothing anew: its libraries are copies, in `copies`, of those of a `HostDevice`.

    A library keeps the state of its running launch, so that each device needs one of its own.
    """

    def __init__(self, directory: Path, copies: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self._copies = copies

    def _compiled(self, name: str, sources: Sequence[Path], options: Sequence[str | Path]) -> Path:
        file = super()._compiled(name, sources, options)
        if file.suffix != ".so":
            return file
        return Path(shutil.copy(file, self._copies))
