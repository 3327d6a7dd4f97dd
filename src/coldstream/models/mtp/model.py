"""The block for multi-token prediction (MTP, "NextN") that a file may have behind its trunk.

It predicts the token after the next one from the trunk's last hidden state and the embedding of the next
token. It is a model of one layer, whose input is eh_proj · [norm(embedding); norm(hidden state)]. Its own
normed output stands for the hidden state when it goes on from a token that it has predicted itself. Embedding
and head are the trunk's unless the block has tables of its own.

With several residual streams the hidden state is all of them, before the trunk's last mixture, with one norm.
Each stream that enters the layer is eh_proj · [norm(embedding); its part of that norm]. A mixture of the
block's own gives what the head reads, and the streams before it are the next hidden state.

The unit of work is a row (token x_{p+1}, hidden state h_p). It is written over `Ops`, like the trunk.
"""

from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import Generic, Protocol, Self, TypeVar

from coldstream.errors import InvalidRequestError, OutOfMemoryError, UnsupportedError
from coldstream.gguf.messages import shorten
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.ops import Array, AttentionInputs, Caches, Ops, Rows, Weight
from coldstream.kvcache import Sequence
from coldstream.kvcache.cache import AttentionState, ModelCache
from coldstream.layers.attention import AttentionWeights
from coldstream.layers.hyper_connections import EnteringStreams
from coldstream.layers.residual import Entering, enter
from coldstream.models.causal_lm import CausalLM
from coldstream.models.loader import Loader
from coldstream.models.spec.sanity import check_small_tensors

MAX_STEP_ROWS = 512
# Candidates are among the first ids: a head of 248,320 rows takes longer to read than the block. Byte pairs
# were merged in the order of their frequency, so that the first ids make up most of any text.
MAX_DRAFT_IDS = 2**16


@dataclass(frozen=True)
class MtpOutputs:
    """What the block gives of rows [T]."""

    outputs: Array  # [T, E], which the head reads
    states: Array  # hidden states of rows that follow: the outputs, or the residual streams [T, C·E]


@dataclass(frozen=True)
class MtpModel:
    """The weights of the block, and what it shares with the trunk."""

    layer: CausalLM  # the block's layer with the embedding, last norm and head that it uses
    eh_proj: Weight | tuple[Weight, Weight]  # see `NextnBlock`
    enorm: Array  # [E]
    hnorm: Array  # [E], of C residual streams [C·E]
    no_injection: Array | None  # zeros [MAX_STEP_ROWS, C]; None with one residual stream

    @classmethod
    def load(cls, file: GGUFFile, trunk: CausalLM, ops: Ops) -> Self:
        """Loads the only MTP block of the trunk's file; `ops` must be able to read the trunk's weights.

        Raises UnsupportedError unless the file has one block, and otherwise as `CausalLM.load`.
        """
        spec = trunk.spec
        if spec.num_nextn_layers != 1:
            raise UnsupportedError(
                f"{shorten(file.paths[0])} has {spec.num_nextn_layers} blocks for multi-token prediction, "
                "and drafting takes a file with one: choose another way of drafting, or another file"
            )
        loader = Loader(file, spec, ops)
        nextn = loader.nextn(spec.num_layers)
        check_small_tensors(spec, loader.vectors, loader.named)
        layer = replace(
            trunk,
            spec=spec.nextn,
            ops=ops,
            token_embd=trunk.token_embd if nextn.token_embd is None else nextn.token_embd,
            blocks=(nextn.block,),
            output_norm=trunk.output_norm if nextn.output_norm is None else nextn.output_norm,
            output=trunk.output if nextn.output is None else nextn.output,
        )
        streams = spec.hyper_connections
        no_injection = None if streams is None else ops.zeros((MAX_STEP_ROWS, streams.num_streams), "float32")
        return cls(layer, nextn.eh_proj, nextn.enorm, nextn.hnorm, no_injection)

    def forward(self, token_ids: Array, hidden: Array, rows: Rows, cache: ModelCache) -> MtpOutputs:
        """Row i is the token token_ids[i], int32 [T], after hidden[i]: a hidden state of the trunk or one of
        the `MtpOutputs.states`.

        A hidden state of the trunk is what its last norm gives [E], or all residual streams before its last
        mixture [C·E]. Advances `cache`, made for the spec of `layer`, at `rows`. InvalidRequestError without
        rows.
        """
        if token_ids.shape[0] == 0:
            raise InvalidRequestError("there are no tokens to compute: a forward pass needs at least one")
        angles = self.layer.angles(rows)
        if self.no_injection is None:
            outputs = self.layer.through_blocks(self._joined(token_ids, hidden), angles, rows, cache)
            return MtpOutputs(outputs, outputs)
        states: list[Array] = []
        entering = self._joined(token_ids, hidden)
        outputs = self.layer.through_blocks(
            entering, angles, rows, cache, lambda layer, streams: states.append(streams)
        )
        return MtpOutputs(outputs, states[0])

    def store(self, token_ids: Array, hidden: Array, rows: Rows, cache: ModelCache) -> Array:
        """Writes the keys and values of `forward`, with its bits, for rows whose outputs nobody needs.

        The rest of the block is not computed. Returns what attention gives in place of that: of no use, but a
        capture needs an output.
        """
        ops, (block,), (state,) = self.layer.ops, self.layer.blocks, cache.layers
        assert isinstance(block.mixer, AttentionWeights)
        assert isinstance(state, AttentionState)
        angles = self.layer.angles(rows)[block.mixer.rope]
        eps = self.layer.spec.rms_norm_eps
        _, normed = enter(ops, self._joined(token_ids, hidden), block.attn_norm, eps)
        key, value = ops.linear(normed, (block.mixer.attn_k, block.mixer.attn_v))
        # Keys stand for queries, as many as there are, and each attends to itself alone.
        heads = replace(
            block.mixer.heads, output_gate="none", window=1, sinks=None, q_bias=block.mixer.heads.k_bias
        )
        return ops.attention(AttentionInputs(key, key, value, angles), heads, Caches(state.k, state.v), rows)

    def _joined(self, token_ids: Array, hidden: Array) -> Entering:
        """What enters the layer: of each token and the hidden state before it."""
        layer, ops, eps = self.layer, self.layer.ops, self.layer.spec.rms_norm_eps
        embedded = ops.embed(layer.token_embd, token_ids)
        if not isinstance(self.eh_proj, tuple):
            pair = ops.rms_norm_pair(embedded, self.enorm, hidden, self.hnorm, eps)
            (x,) = ops.linear(pair, (self.eh_proj,))
            return x
        assert self.no_injection is not None
        of_embedding, of_streams = self.eh_proj
        num_rows, num_streams = token_ids.shape[0], self.no_injection.shape[1]
        assert num_rows <= MAX_STEP_ROWS, "there are zeros for so many rows"
        streams = ops.project_streams(hidden, self.hnorm, eps, of_streams, num_streams)
        (update,) = ops.linear(ops.rms_norm(embedded, self.enorm, eps), (of_embedding,))
        return EnteringStreams(streams, update, self.no_injection[:num_rows])

    def logits(self, outputs: Array) -> Array:
        """Logits of outputs of `forward`: [T, E] → [T, vocab]."""
        return self.layer.logits(outputs)


class BlockOnDevice(Protocol):
    """The block on a device, with the rows of some sequences."""

    context_length: int  # rows of a sequence at most

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forgets all rows of a sequence but the first `length`; with none left it frees its memory."""


Block = TypeVar("Block", bound=BlockOnDevice)


class MtpRows(Generic[Block]):
    """Rows of one sequence of a block. They free their memory when they are truncated to none."""

    def __init__(self, block: Block, sequence: Sequence) -> None:
        self._block, self._sequence = block, sequence

    @property
    def length(self) -> int:
        """Rows so far."""
        return self._sequence.length

    @property
    def room(self) -> int:
        """Rows that may follow."""
        return self._block.context_length - self.length

    def check(self, token_ids: Sized, states: Sized) -> None:
        """What is appended: a state for each token. Raises OutOfMemoryError for more than `room`."""
        assert 0 < len(token_ids) == len(states), "a row is a token and a hidden state"
        if len(token_ids) > self.room:
            raise OutOfMemoryError(
                f"{len(token_ids)} rows of a draft, but {self.room} fit into the context: "
                "try a larger --ctx-size"
            )

    def truncate(self, length: int) -> None:
        """Forgets all rows but the first `length`. Raises InvalidRequestError if there are fewer."""
        self._block.truncate(self._sequence, length)
