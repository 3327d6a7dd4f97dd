"""The work around a step if the GPU does not hold all layers of a dense model, without a GPU."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from bench.runners import layers_plan, open_model_file
from builders import Dims, write_gguf
from coldstream.errors import GenerationFault
from coldstream.experts.partial_layers import PartialLayers
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS, WORDS_PER_LINE, Mailbox
from device_seams import model_device


class Server:
    """In place of the CPU's threads: notes calls."""

    def __init__(self) -> None:
        self.calls = list[str]()
        self.error: Exception | None = None

    def begin(self) -> None:
        self.calls.append("begin")

    def end(self) -> None:
        self.calls.append("end")

    def check(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[tuple[PartialLayers, Server]]:
    (path,) = write_gguf(tmp_path / "dense.gguf", "qwen35", dims=Dims(layers=2, ffn=256))
    file, spec = open_model_file(path)
    sizes = {"context_length": 64, "chunk_size": 64, "threads": 1, "streamed": 0.5}
    with model_device(0):
        mailbox = Mailbox.create(1, spec.hidden_size)
        partial = PartialLayers(mailbox, layers_plan(file, spec, [0], **sizes))
        server = Server()
        real, partial.host.server = partial.host.server, server
        yield partial, server
        partial.host.server = real
        partial.close()
    file.close()


def test_the_cpu_looks_for_requests_while_a_step_of_few_rows_runs(
    layers: tuple[PartialLayers, Server],
) -> None:
    partial, server = layers
    for rows in (1, MAX_MAILBOX_ROWS):
        partial.start_step(rows)
        partial.launched()
    assert partial.must_wait(1)
    assert server.calls == ["begin"] * 2
    partial.ended(num_running=1)
    assert not partial.must_wait(1)
    assert server.calls == ["begin"] * 2
    partial.ended()
    assert server.calls == ["begin"] * 2 + ["end"]


def test_a_prompt_asks_the_cpu_for_nothing(layers: tuple[PartialLayers, Server]) -> None:
    partial, server = layers
    partial.start_step(MAX_MAILBOX_ROWS + 1)
    partial.launched()
    assert server.calls == []


def test_errors_of_the_cpu_and_of_waits_for_it_end_the_step(layers: tuple[PartialLayers, Server]) -> None:
    partial, server = layers
    partial.start_step(1)
    partial.launched()
    server.error = GenerationFault("as from a worker")
    with pytest.raises(GenerationFault, match="worker"):
        partial.ended()
    server.error = None
    words: np.ndarray = partial.host.mailbox.words.numpy()
    words[WORDS_PER_LINE + 1] = 1
    with pytest.raises(GenerationFault, match="in time"):
        partial.ended()
