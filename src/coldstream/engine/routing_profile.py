"""Records the experts that a text uses: a `RoutingTrace` of a model.

Tokens are computed in chunks, like a prompt. As results depend neither on chunks nor on the device, this is
also the routing of decoding the same tokens, and of a GPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from coldstream.errors import InvalidRequestError
from coldstream.gguf.hub import resolve_model
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.footprint import routed_model
from coldstream.models.read_spec import read_spec
from coldstream.models.runner import Progress
from coldstream.placement.hardware import Hardware
from coldstream.placement.routing_trace import MAX_IDS, RoutedModel, RoutingTrace
from coldstream.planning.config import MAX_BYTES, EngineConfig
from coldstream.planning.device_choice import OpenProgress
from coldstream.planning.gather import Sources, plan_model


def profile_text(config: EngineConfig, text: str, progress: OpenProgress | None = None) -> RoutingTrace:
    """The routing of `text` in the model that `config` names, on the CPU, whatever its device.

    A text longer than the context is split into parts that each start from nothing. Raises as `open_model`,
    and InvalidRequestError for a text that is empty or longer than a trace can be.
    """
    # Routing is recorded if all experts are mapped, whatever the budgets of `config`.
    config = replace(config, device="cpu", plan=None, ram=MAX_BYTES)
    path = resolve_model(config.model, offline=config.offline, progress=progress)
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        model = routed_model(file, spec)
        token_ids = Tokenizer.from_metadata(file.metadata).encode(text)
        _check_length(token_ids, model)
        planned = plan_model(config, Sources(file, spec, Hardware.measure()))
        runner = CpuRunner.load(
            file,
            spec,
            planned.run,
            tier=config.tier,
            progress=partial(progress, "loading") if progress else None,
        )
        recording = partial(progress, "recording") if progress else None
        return record_routing(runner, model, token_ids, recording)


def record_routing(
    runner: CpuRunner, model: RoutedModel, token_ids: Sequence[int], progress: Progress | None = None
) -> RoutingTrace:
    """The choices of a recording runner's routers for `token_ids`, at least one.

    progress is called with (tokens done, tokens in all) after each chunk.
    """
    topk_ids = np.empty((len(token_ids), model.num_layers, model.num_experts_per_tok), np.uint16)
    sequence, done = runner.new_sequence(), 0
    while done < len(token_ids):
        if sequence.length == runner.context_length:
            runner.clear(sequence)
        count = min(runner.chunk_size, runner.context_length - sequence.length, len(token_ids) - done)
        runner.extend(sequence, token_ids[done : done + count])
        topk_ids[done : done + count] = runner.topk_ids(count)
        done += count
        if progress is not None:
            progress(done, len(token_ids))
    runner.release(sequence)
    return RoutingTrace(model, topk_ids)


def _check_length(token_ids: Sequence[int], model: RoutedModel) -> None:
    longest = MAX_IDS // model.ids_per_step
    if not 0 < len(token_ids) <= longest:
        raise InvalidRequestError(
            f"the text has {len(token_ids)} tokens, a trace of this model 1 to {longest}: give another text"
        )
