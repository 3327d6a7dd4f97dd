"""Tensors of a file are copied to the device piece by piece, on the host's driver."""

import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from builders import SMALL, write_gguf
from coldstream.gguf import GGUFFile
from coldstream.kernels.cuda import upload
from coldstream.kernels.cuda.contents import read
from coldstream.kernels.cuda.memory import own_bytes
from coldstream.kernels.cuda.upload import Upload, run_uploads
from host_driver import HostDriver


def test_all_bytes_arrive_and_the_caller_frees_the_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = write_gguf(tmp_path / "small.gguf", dims=SMALL, quant="Q8_0", tokenizer=False)
    monkeypatch.setattr(upload, "PIECE_BYTES", 1000)
    freeing: list[int] = []
    with HostDriver().installed() as driver, GGUFFile.open(path) as file:
        free = driver.cuMemFree

        def noted(address: int) -> tuple[object]:
            freeing.append(threading.get_ident())
            return free(address)

        monkeypatch.setattr(driver, "cuMemFree", noted)
        uploads = [Upload(file, info, own_bytes(info.num_bytes)) for info in file.tensors.values()]
        done: list[tuple[int, int]] = []
        run_uploads(uploads, lambda *amounts: done.append(amounts))
        for each in uploads:
            np.testing.assert_array_equal(read(each.destination), file.read(each.info))
    total = sum(each.info.num_bytes for each in uploads)
    assert done[-1] == (total, total)
    assert len(done) > len(uploads)
    assert set(freeing) == {threading.get_ident()}
