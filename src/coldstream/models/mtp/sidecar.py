"""A sidecar: a GGUF file that holds the block for multi-token prediction (MTP) of a model, and not its trunk.

Publishers ship one beside files without the block. What is known of them, by llama.cpp's converter and
loader and by published files:

- `convert_hf_to_gguf.py --mtp` writes one, named `mtp-….gguf`; `--no-mtp` writes the trunk without a block.
- `general.architecture` is the trunk's, and so are the other keys and the tokenizer. `block_count` is one
  more than the trunk's, and `nextn_predict_layers` is 1. So the block is `blk.N` for a trunk of N layers. All
  of its tensors have the names that they have in a file with both.
- Most hold copies of `token_embd`, `output` and `output_norm`, which are the trunk's. They are 85 % of the
  bytes of one of Qwen3.8-27B. Of Qwen3.8-Flash-Next there are also some without, whose key
  `nextn_shared_target_tensors` is true. Some hold `output_hc_*`, the trunk's too; the block's own mixture
  before the head is `blk.N.nextn.hc_head_*`.
- Arrays of a value for each layer count the block. `attention.compress_ratios` has a 0 for it, though its
  attention is that of the trunk's layers with an indexer.

Here the block joins the trunk's file, as if it had been in it: what reads, counts, places and computes it
needs to know nothing. Keys are the trunk's, and so are embedding, last norm and head, unless the block has
tables of its own. A copy is never read.

The unit of work is a file. Knows nothing of configurations.
"""

import re
from typing import Final

from coldstream.errors import ConfigError, UnsupportedError
from coldstream.gguf.messages import shorten
from coldstream.gguf.metadata import Metadata
from coldstream.gguf.reader import GGUFFile
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.hyperparameters import MAX_BLOCKS, MAX_NEXTN_LAYERS
from coldstream.models.spec.model_spec import ModelSpec

_BLOCK: Final = re.compile(r"blk\.([0-9]{1,9})\.(nextn\.)?")
_OF_THIS_MODEL: Final = "give the sidecar of this model"
_TOKENIZER: Final = ("tokenizer.ggml.model", "tokenizer.ggml.tokens")


def sidecar_blocks(file: GGUFFile) -> tuple[int, ...]:
    """The numbers of the blocks of a sidecar; none for any other file.

    Raises InconsistentError for keys that are no numbers of blocks.
    """
    found = [(int(match[1]), bool(match[2])) for match in map(_BLOCK.match, file.tensors) if match]
    blocks, with_nextn = {number for number, _ in found}, {number for number, of_nextn in found if of_nextn}
    behind = _first_behind(file.metadata)
    return tuple(sorted(blocks)) if all(each in with_nextn or each >= behind for each in blocks) else ()


def _first_behind(keys: Metadata) -> int:
    """The first number of a block that a file declares to lie behind the trunk."""
    name = keys.text("general.architecture")
    declared = keys.integer(f"{name}.nextn_predict_layers", 0, MAX_NEXTN_LAYERS, 0)
    return (
        keys.integer(f"{name}.block_count", 0, MAX_BLOCKS, MAX_BLOCKS) - declared if declared else MAX_BLOCKS
    )


def join_sidecar(file: GGUFFile, spec: ModelSpec, sidecar: GGUFFile) -> ModelSpec:
    """Adds the block of an open sidecar to the trunk's open file, which it then belongs to; its spec.

    Raises ConfigError for a sidecar of another model and for a trunk with a block of its own. Raises
    UnsupportedError for several blocks, and another ModelFormatError for a tensor that is missing or has
    another shape. Both files stay as they were then.
    """
    _check_block(file, spec, sidecar)
    _check_model(file, spec, sidecar)
    block, name = spec.num_layers, spec.architecture
    values = {f"{name}.block_count": block + 1, f"{name}.nextn_predict_layers": 1}
    own = {each: info for each, info in sidecar.tensors.items() if each.startswith(f"blk.{block}.")}
    # The trunk was read before, so that what is wrong now is the sidecar's.
    keys = file.metadata.with_values(values, sidecar.paths[0])
    joined = read_spec(keys, {**file.tensors, **own})
    file.join(sidecar, own, values)
    return joined


def _check_block(file: GGUFFile, spec: ModelSpec, sidecar: GGUFFile) -> None:
    """Whether there is one block, and a place for it."""
    path, trunk = shorten(sidecar.paths[0]), shorten(file.paths[0])
    architecture = sidecar.metadata.text("general.architecture")
    if architecture != spec.architecture:
        raise ConfigError(
            f"{path} holds the MTP block of a {architecture} model, and {trunk} is {spec.architecture}: "
            f"{_OF_THIS_MODEL}"
        )
    if spec.num_nextn_layers:
        raise ConfigError(
            f"{path} holds an MTP block, and {trunk} has one of its own: leave --model-draft out, and give "
            "--spec-type mtp"
        )
    blocks = sidecar_blocks(sidecar)
    if len(blocks) != 1:
        raise UnsupportedError(
            f"{path} holds {len(blocks)} blocks for multi-token prediction, and drafting takes one: give a "
            "sidecar with one, or another drafter"
        )
    if blocks[0] != spec.num_layers:
        raise ConfigError(
            f"{path} holds the MTP block of a model of {blocks[0]} layers, and {trunk} has "
            f"{spec.num_layers}: {_OF_THIS_MODEL}"
        )


def _check_model(file: GGUFFile, spec: ModelSpec, sidecar: GGUFFile) -> None:
    """Whether the sidecar was taken from a model of the same width, with the same tokens."""
    path, trunk, keys = shorten(sidecar.paths[0]), shorten(file.paths[0]), sidecar.metadata
    hidden_size = keys.integer(f"{spec.architecture}.embedding_length", 1, 1 << 16, spec.hidden_size)
    table = sidecar.tensors.get("token_embd.weight")
    vocab_size = spec.vocab_size if table is None else table.shape[0]
    if hidden_size != spec.hidden_size:
        problem = f"a hidden size of {hidden_size}, and {trunk} has {spec.hidden_size}"
    elif vocab_size != spec.vocab_size:
        problem = f"a vocabulary of {vocab_size} tokens, and {trunk} has {spec.vocab_size}"
    elif differs := [name for name in _TOKENIZER if _differ(keys, file.metadata, name)]:
        problem = f"another tokenizer than {trunk}, as {differs[0]} differs"
    else:
        return
    raise ConfigError(f"{path} has {problem}: {_OF_THIS_MODEL}")


def _differ(one: Metadata, other: Metadata, name: str) -> bool:
    """Whether both have a key, with different values."""
    return name in one and name in other and one[name] != other[name]
