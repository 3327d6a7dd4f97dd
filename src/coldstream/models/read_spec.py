"""Reads the numbers of a model from its metadata and tensor table, and checks them against each other.

A spec that was read is consistent. Every number lies in a sane range, and kernels compute every layer. Every
tensor that the model needs is present with the shape that the numbers imply. Reads no weights.
"""

from collections.abc import Mapping, Sequence

from coldstream.errors import InconsistentError
from coldstream.gguf.messages import INCOMPLETE, RECONVERT, shorten
from coldstream.gguf.metadata import Metadata, Value
from coldstream.gguf.reader import TensorInfo
from coldstream.models.architectures import architecture_of
from coldstream.models.architectures.tensor_table import validate_tensors
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.kernel_support import check_kernels
from coldstream.models.spec.layer_specs import AttentionSpec, LayerSpec
from coldstream.models.spec.model_spec import ModelSpec


def read_spec(metadata: Mapping[str, Value], tensors: Mapping[str, TensorInfo]) -> ModelSpec:
    """The spec of the model that `metadata` and `tensors` (name → TensorInfo) describe.

    Raises UnsupportedError for files that are something else than a whole model of a known architecture, or
    that ask for what no kernel computes. Raises InconsistentError or LimitError naming the key or tensor that
    is wrong. Give a `Metadata` for messages that name the file and the byte.
    """
    keys = metadata if isinstance(metadata, Metadata) else Metadata(metadata, {})
    architecture = architecture_of(keys)
    numbers = Hyperparameters(keys, tensors, architecture.name)
    vocab_size = _vocab_size(numbers, tensors)
    blocks = architecture.read_layers(numbers)
    check_kernels(blocks, numbers)
    hidden_size = numbers.integer("embedding_length", 1, 1 << 16)
    cap = numbers.number("final_logit_softcapping", 0.0, 1e6, 0.0) if architecture.caps_logits else 0.0
    spec = ModelSpec(
        architecture=architecture.name,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        context_length=_context_length(numbers, blocks),
        rms_norm_eps=numbers.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
        tied_output="output.weight" not in tensors,
        layers=blocks[: numbers.num_layers],
        nextn_layers=blocks[numbers.num_layers :],
        embedding_scale=hidden_size**0.5 if architecture.scales_embeddings else 1.0,
        logit_softcap=cap,
        num_absent_nextn_layers=numbers.num_absent_nextn_layers,
    )
    validate_tensors(spec, tensors, keys.path)
    return spec


def _context_length(numbers: Hyperparameters, blocks: Sequence[LayerSpec]) -> int:
    """Tokens of a text at most: those of the file, or fewer if it does not say how an indexer chooses."""
    indexers = (block.mixer.indexer for block in blocks if isinstance(block.mixer, AttentionSpec))
    bounds = [each.dense_positions for each in indexers if each is not None and not each.block_size]
    return min([numbers.integer("context_length", 1, 1 << 24), *bounds])


def _vocab_size(numbers: Hyperparameters, tensors: Mapping[str, TensorInfo]) -> int:
    keys = numbers.keys
    if "token_embd.weight" not in tensors:
        raise InconsistentError(
            f"{shorten(keys.path)}: the tensor token_embd.weight is missing: {INCOMPLETE}"
        )
    vocab_size = tensors["token_embd.weight"].shape[0]
    tokens = keys.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != vocab_size:
        problem = f"{len(tokens)} tokens, but token_embd.weight has {vocab_size} rows: {RECONVERT}"
        raise keys.error(InconsistentError, "tokenizer.ggml.tokens", problem)
    declared = numbers.integer("vocab_size", 1, 1 << 24, vocab_size)
    if declared != vocab_size:
        raise numbers.inconsistent("vocab_size", f"{declared}, but token_embd.weight has {vocab_size} rows")
    return vocab_size
