"""Split models: from the path of one part to the paths of all, and the checks that they belong together.

A split model is `NAME-00001-of-0000N.gguf` … in one directory. The parts are found by that name alone, never
by anything written in a file. Links need a rule: hub caches keep the bytes in `blobs/` and present every
file, parts included, as a link to there, so links are normal; but a link beside a model must not make us read
a file elsewhere. The part that the user named may lie anywhere. The directory where it lies, and the one
where it was named, are the model's directories, and every other part must lie in one of them. In a hub cache
that is `blobs/`.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from coldstream.errors import DuplicateError, InconsistentError
from coldstream.gguf.header import Header, TensorInfo
from coldstream.gguf.messages import shorten
from coldstream.gguf.metadata import Metadata

MAX_SHARDS: Final = 512

_PART_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


def shard_count(metadata: Metadata) -> int:
    """In how many parts the model comes, according to one of them."""
    return metadata.integer("split.count", 0, MAX_SHARDS, 1) or 1


def part_index(path: Path) -> int:
    """The index of the part by its name, from 0; 0 for a name of any other form."""
    match = _PART_NAME.fullmatch(path.name)
    return max(int(match["number"]) - 1, 0) if match else 0


def shard_paths(path: Path, metadata: Metadata) -> tuple[Path, ...]:
    """The paths of all parts of the model of which `path` is one, in order; `path` alone if it is not split.

    Raises InconsistentError when name and metadata disagree, or when a part is a link that leaves the model's
    directories. Does not check whether the parts exist.
    """
    count = shard_count(metadata)
    match = _PART_NAME.fullmatch(path.name)
    if match is None and count == 1:
        return (path,)
    if match is None:
        problem = f"{count}, but the name is not …-00001-of-{count:05}.gguf: the other parts can't be found"
        raise metadata.error(InconsistentError, "split.count", problem)
    if int(match["count"]) != count or not 1 <= int(match["number"]) <= count:
        problem = f"{count}, but the file is named {path.name}: give it the name it was published under"
        raise metadata.error(InconsistentError, "split.count", problem)
    paths = tuple(path.with_name(f"{match['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count))
    _check_links(path, paths)
    return paths


def _check_links(named: Path, paths: Sequence[Path]) -> None:
    home = os.path.realpath(named.parent)
    homes = {home, os.path.dirname(os.path.realpath(named))}
    for path in paths:
        target = os.path.realpath(path)
        if os.path.dirname(target) not in homes:
            raise InconsistentError(
                f"{shorten(path)}: links to another directory than {named.name}: put all parts into one"
            )


def check_parts(headers: Sequence[Header]) -> None:
    """Raises InconsistentError or DuplicateError unless `headers` are parts 0 … n−1 of one model."""
    first = headers[0].metadata
    architecture = first.get("general.architecture")
    names: dict[str, TensorInfo] = {}
    for index, header in enumerate(headers):
        metadata = header.metadata
        if shard_count(metadata) != len(headers):
            problem = f"{shard_count(metadata)}, but {len(headers)} in {first.path.name}: from another model"
            raise metadata.error(InconsistentError, "split.count", problem)
        number = metadata.integer("split.no", 0, MAX_SHARDS)
        if number != index:
            problem = f"{number}, expected {index}: the parts were renamed or copied over each other"
            raise metadata.error(InconsistentError, "split.no", problem)
        if metadata.get("general.architecture", architecture) != architecture:
            problem = f"differs from {first.path.name}: a part of another model"
            raise metadata.error(InconsistentError, "general.architecture", problem)
        _merge(names, header.tensors, metadata)
    for header in headers:
        total = header.metadata.integer("split.tensors.count", 0, 1 << 31)
        if total != len(names):
            problem = f"{total}, but the parts hold {len(names)} tensors together: a part of another model"
            raise header.metadata.error(InconsistentError, "split.tensors.count", problem)


def _merge(names: dict[str, TensorInfo], more: Mapping[str, TensorInfo], metadata: Metadata) -> None:
    for name, info in more.items():
        if name in names:
            problem = f"also in part {names[name].shard + 1}: from another model, or copied over another part"
            raise metadata.error(DuplicateError, name, problem)
        names[name] = info
