"""Opening a model on a GPU."""

from pathlib import Path

from coldstream.gguf.reader import GGUFFile
from coldstream.models.cuda_runner import CudaRunner
from coldstream.models.spec import ModelSpec


def open_cuda(path: Path, context_length: int = 256, num_slots: int = 1, kv_type: str = "f16") -> CudaRunner:
    file = GGUFFile.open(path)
    spec = ModelSpec.from_gguf(file.metadata, file.tensors)
    return CudaRunner.load(file, spec, context_length=context_length, kv_type=kv_type, num_slots=num_slots)
