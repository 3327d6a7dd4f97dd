"""A GPU's model on the host: real layers, operations, launchers and kernels, threads that take turns."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coldstream.gguf import GGUFFile
from coldstream.kernels.cuda import loader
from coldstream.kernels.cuda.staged import StagedMemory
from coldstream.kernels.cuda.upload import Upload
from coldstream.kvcache.batch import BatchLimits, CheckedSegment
from coldstream.kvcache.cache import CacheSize
from coldstream.kvcache.sequence_cache import AcceptedPath
from coldstream.models import ModelSpec
from coldstream.models.cuda_model import HEAD_ROWS, MAX_SEGMENTS, Limits, Loaded, StepShape
from coldstream.models.runner import Array, ModelRunner, Progress
from host_device import HostMemory

CHUNK = 512


class HostModel(ModelRunner):
    """All experts are resident; steps are not captured, and have no rows besides those of their batch."""

    head_rows = HEAD_ROWS
    chunk_size = CHUNK
    reads_file = False
    tier = "host"
    threads = 1
    warnings = ()

    def __init__(self, path: Path, limits: Limits, *, is_deep: bool) -> None:
        file = GGUFFile.open(path)
        super().__init__(file, ModelSpec.from_gguf(file.metadata, file.tensors), limits.context_length)
        self.limits, self.cache_size, self._is_deep = limits, limits.cache_size, is_deep
        self._limits = BatchLimits(self.spec.vocab_size, limits.context_length, CHUNK, MAX_SEGMENTS)
        self.loaded = Loaded.into(HostMemory(), file, self.spec, limits, CHUNK)
        self.loaded.ops.finish_loading(None)
        self._sequences = self.loaded.sequences

    def _launch(self, segments: Collection[CheckedSegment]) -> None:
        self._sequences.reserve([segment.demand for segment in segments])
        count = sum(len(segment.token_ids) for segment in segments)
        shape = StepShape(
            count,
            has_trees=any(segment.parents is not None for segment in segments),
            has_prompts=any(segment.is_prompt for segment in segments),
            is_deep=self._is_deep,
        )
        inputs = self.loaded.inputs.on_host(count)
        inputs.pad(inputs.write(segments))
        self._hidden = self.loaded.step(shape)

    def _logits_of(self, rows: Array) -> Array:
        if not len(rows):
            return np.empty((0, self.spec.vocab_size), np.float32)
        logits: Any = self.loaded.model.logits(self._hidden.take(torch.from_numpy(rows)))
        return logits.numpy()

    def _commit(self, path: AcceptedPath) -> None:
        self.loaded.commits.on_host.write(path)
        self.loaded.commit()


@contextmanager
def open_host(
    path: Path, kv_type: str, cache_size: CacheSize, context_length: int, *, is_deep: bool = False
) -> Iterator[HostModel]:
    """Inside the fixture `host`. is_deep: whether kernels for long contexts run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagedMemory, "__init__", _staged_on_host)
        patch.setattr(StagedMemory, "copy", lambda staged, count: None)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(loader, "run_uploads", _read_uploads)
        with HostModel(path, Limits(cache_size, context_length, kv_type), is_deep=is_deep) as model:
            yield model


def _staged_on_host(staged: StagedMemory, values: torch.Tensor) -> None:
    staged.values, staged.on_host = values, values.numpy()


def _read_uploads(uploads: list[Upload], progress: Progress | None) -> None:
    for upload in uploads:
        upload.destination.copy_(torch.from_numpy(upload.file.read(upload.info)))
