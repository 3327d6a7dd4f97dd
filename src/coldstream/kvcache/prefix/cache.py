"""Prefixes of prompts whose keys, values and recurrent states are kept for later prompts.

A prompt begins with a fork of the longest kept prefix. The blocks of keys and values are shared, and
nothing is copied. Every token after it has the bits of a prompt computed from its start.

A recurrent state describes one length only, and layers with windows may keep the end of a sequence alone. So
the cache chooses checkpoints: lengths of a prompt at which `keep` is to be called. They are boundaries that
the caller knows, the place where the prompt parts from earlier ones, and others between them, so that little
is computed twice. A model without either can begin with any part of a kept prefix. Its prompts have one
checkpoint, before the last token.

Namespaces share nothing. When memory is needed, the prefix is evicted that costs least to compute again. That
depends on its tokens beyond the nearest kept prefix, and on how often and how recently it was of use. Tiers
take the bytes of evicted prefixes, and give them back to later prompts.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coldstream.errors import InvalidRequestError
from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache.cache import NOTHING, CacheSize
from coldstream.kvcache.prefix.tiers import CacheAccess, PrefixTier, PrefixTiers, TierStatistics
from coldstream.kvcache.prefix.tree import Array, Node, PrefixTree
from coldstream.kvcache.sequence import Sequence

MIN_GAP = 16  # tokens that are computed again sooner than a state of them is worth its memory


class SequenceMemory(CacheAccess, Protocol):
    """The part of a `ModelRunner` that the cache needs."""

    def new_sequence(self) -> Sequence: ...
    def fork(self, sequence: Sequence) -> Sequence: ...
    def release(self, sequence: Sequence) -> None: ...
    @property
    def free(self) -> CacheSize: ...
    def freed_by(self, sequences: Collection[Sequence]) -> CacheSize: ...


@dataclass(frozen=True)
class Prefix:
    """What a prompt begins with."""

    sequence: Sequence  # the caller's, who releases it
    length: int  # tokens of the prompt that it holds; at least one is left to compute
    checkpoints: tuple[int, ...]  # longer lengths, ascending, at which `PrefixCache.keep` is to be called


@dataclass(frozen=True)
class PrefixStatistics:
    """Counts since the cache was made, and what it holds."""

    prompts: int = 0
    hits: int = 0  # prompts of which something was kept
    prompt_tokens: int = 0
    reused_tokens: int = 0
    repeated_tokens: int = 0  # known from prompts before, and yet to be computed again
    keeps: int = 0
    refused: int = 0  # prefixes not kept as all that is kept is pinned
    evictions: int = 0
    restored: int = 0  # prefixes that came back from a tier
    kept: int = 0  # now
    pinned: int = 0  # now
    remembered_tokens: int = 0  # now, of prompts of which nothing is kept
    out_of_memory: int = 0  # prefixes that tiers lacked RAM to take or to give back
    tiers: tuple[TierStatistics, ...] = ()


@dataclass(eq=False)
class Kept:
    """A kept prefix, whose sequence is the cache's."""

    node: "Node[Kept]"
    namespace: str
    sequence: Sequence
    uses: float  # decayed, as of prompt number `last_use`
    last_use: int
    num_pins: int = 0
    is_saved: bool = False  # or refused, by the tiers that last
    is_gone: bool = False


class Pin:
    """A prefix that stays until `PrefixCache.unpin` or `clear`."""

    def __init__(self, kept: Kept) -> None:
        self._kept: Kept | None = kept
        self.length = kept.node.length

    def take(self) -> Kept | None:
        """What is pinned, once."""
        kept, self._kept = self._kept, None
        return kept


MAX_REPLAY = 2048  # tokens of a known prefix that are computed again, if there are states enough
MAX_PASSED = 4096  # remembered prompts of which nothing is kept
MAX_PASSED_TOKENS = 4 << 20
MAX_CHECKPOINTS = 64  # of a prompt, if a tier takes evicted prefixes
HALF_LIFE = 64  # prompts after which a use counts half


class PrefixCache:
    """Kept prefixes of one model. It owns the sequences of kept prefixes and no other; one thread uses it."""

    def __init__(
        self,
        sequences: SequenceMemory,
        *,
        max_states: int,
        max_replay: int = MAX_REPLAY,
        tiers: Collection[PrefixTier] = (),
    ) -> None:
        """max_states: prefixes kept at a time, 0 for none. tiers: the fastest first, now its own."""
        self._memory = sequences
        self._max_states = max_states
        self._max_replay = max_replay
        self._tree: PrefixTree[Kept] = PrefixTree(MAX_PASSED, MAX_PASSED_TOKENS)
        self._kept: set[Kept] = set()
        self._prompts = self._hits = self._prompt_tokens = self._reused_tokens = self._repeated_tokens = 0
        self._keeps = self._refused = self._evictions = self._restored = 0
        self._tiers = PrefixTiers(sequences, tiers)
        with sequences.contents() as cache:
            self._is_recurrent, self._truncates_anywhere = cache.is_recurrent, cache.truncates_anywhere
        # One prompt leaves half of the states to others, unless RAM takes what it evicts.
        share = min(max_states, max(1, max_states // 2))
        self._max_checkpoints = max(share, MAX_CHECKPOINTS) if max_states and self._tiers.is_fast else share

    def begin(
        self,
        token_ids: TokenIds[int],
        boundaries: Collection[int] = (),
        namespace: str = "",
    ) -> Prefix:
        """A sequence with the longest kept prefix of a prompt, for the caller to extend and to release.

        boundaries: lengths after which later prompts may go on differently. Remembers that the prompt passed.
        Raises InvalidRequestError for a prompt without tokens, with nothing changed.
        """
        ids = _as_array(token_ids)
        self._prompts += 1
        self._prompt_tokens += len(ids)
        found, matched = self._tree.find(namespace, ids)
        held, length = self._longest(found, namespace, ids)
        restored = self._restore(namespace, ids, held, length)
        if restored:
            held, length = restored, restored.node.length
        sequence = self._begun(held, length) if held else self._memory.new_sequence()
        self._reused_tokens += length
        matched = max(matched, length)
        self._repeated_tokens += min(matched, len(ids) - 1) - length
        if self._max_states:
            self._tree.remember(namespace, ids)
        checkpoints = choose_checkpoints(
            length,
            len(ids),
            parting=0 if self._truncates_anywhere else matched,
            boundaries=() if self._truncates_anywhere else boundaries,
            max_replay=len(ids) if self._truncates_anywhere else self._max_replay,
            limit=self._max_checkpoints,
        )
        return Prefix(sequence, length, checkpoints)

    def longest(self, token_ids: TokenIds[int], namespace: str = "") -> int:
        """Tokens of the prefix that `begin` would find in the model's memory."""
        ids = _as_array(token_ids)
        return self._longest(self._tree.find(namespace, ids)[0], namespace, ids)[1]

    def keep(self, token_ids: TokenIds[int], sequence: Sequence, namespace: str = "") -> None:
        """Keeps all that a sequence holds, `sequence.length` of `token_ids`; the caller goes on with it.

        The sequence's step must have ended, and its last logits must be known to be finite: a NaN in a state
        would be in every later answer. The sequence shares its memory with the kept prefix from then on. So
        its next step takes a state, and a block where it is within one. Nothing is kept if all prefixes are
        pinned. Raises InvalidRequestError as `ModelRunner.fork`, and
        for a sequence longer than `token_ids`, and DeviceError, with nothing kept.
        """
        if sequence.length > len(token_ids):
            raise InvalidRequestError(
                f"a sequence of {sequence.length} tokens cannot be kept with {len(token_ids)} token ids"
            )
        if not sequence.length or not self._max_states:
            return
        ids = _as_array(token_ids[: sequence.length])
        known = self._tree.continuing(namespace, ids)
        if known and (known[0].node.length == len(ids) or self._truncates_anywhere):
            self._use(known[0])
            return
        fork = self._memory.fork(sequence)
        try:
            if self._truncates_anywhere:
                self._remove_parts(namespace, ids)
            if len(self._kept) >= self._max_states and not self._evict_one():
                self._memory.release(fork)
                self._refused += 1
                return
        except BaseException:
            self._memory.release(fork)
            raise
        self._enter(namespace, ids, fork)
        self._keeps += 1

    def make_room(self, need: CacheSize) -> bool:
        """Evicts prefixes until so many blocks and states are free; `need` has no rows of trees.

        False, with nothing changed, if sequences in use and pins have too much of the memory.
        """
        free = self._memory.free
        loose = [kept for kept in self._kept if not kept.num_pins]
        if not free.covers(need):
            all_loose = self._memory.freed_by([kept.sequence for kept in loose])
            if not free.with_more(all_loose).covers(need):
                return False
        while not (free := self._memory.free).covers(need):
            if not self._evict_one(free, need):
                return False
        return True

    def forget(self, token_ids: TokenIds[int], namespace: str = "") -> None:
        """Evicts the kept prefix of exactly these tokens, unless it is pinned.

        Where sequences are truncated anywhere, also a kept prefix that begins with them. So a sequence that
        began with the prefix owns its memory alone, and can go on where there is no other. Tiers take the
        prefix, as of any eviction.
        """
        ids = _as_array(token_ids)
        for kept in self._tree.continuing(namespace, ids):
            is_same = kept.node.length == len(ids)
            if (is_same or self._truncates_anywhere) and not kept.num_pins:
                self._evict(kept)

    def pin(self, token_ids: TokenIds[int], namespace: str = "") -> Pin | None:
        """Keeps the longest kept prefix of `token_ids` from eviction. None if there is none."""
        found, _ = self._tree.find(namespace, _as_array(token_ids))
        held = [node.entry for node in found if node.entry is not None]
        if not held:
            return None
        held[-1].num_pins += 1
        return Pin(held[-1])

    def unpin(self, pin: Pin) -> None:
        """Ends a pin. Does nothing a second time, and after `clear`."""
        kept = pin.take()
        if kept is not None and not kept.is_gone:
            kept.num_pins -= 1

    def clear(self, namespace: str | None = None) -> None:
        """Forgets all prefixes of a namespace, or of all namespaces. Their pins are void then."""
        for each in self._tree.namespaces if namespace is None else (namespace,):
            for kept in self._tree.remove(each):
                self._drop(kept)
        self._tiers.clear(namespace)

    def save_one(self) -> bool:
        """Gives the tiers that last a kept prefix that they lack. For idle moments.

        A prefix comes after the shorter ones that it continues. Among the others the most valuable goes
        first. False if there is none. Raises DeviceError.
        """
        unsaved = {kept for kept in self._kept if not kept.is_saved}
        if not self._tiers.has_lasting or not unsaved:
            return False
        kept = max((each for each in unsaved if _ancestor(each) not in unsaved), key=self._worth)
        self._tiers.save(kept.namespace, kept.node.token_ids, kept.sequence)
        kept.is_saved = True
        return True

    def close(self) -> None:
        """Saves what lasts, frees the memory of all prefixes and closes the tiers. Raises DeviceError."""
        try:
            while self.save_one():
                pass
        finally:
            for kept in tuple(self._kept):
                self._remove(kept)
            self._tiers.close()

    def statistics(self) -> PrefixStatistics:
        """Counts so far."""
        return PrefixStatistics(
            prompts=self._prompts,
            hits=self._hits,
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            repeated_tokens=self._repeated_tokens,
            keeps=self._keeps,
            refused=self._refused,
            evictions=self._evictions,
            restored=self._restored,
            kept=len(self._kept),
            pinned=sum(kept.num_pins > 0 for kept in self._kept),
            remembered_tokens=self._tree.num_passed_tokens,
            out_of_memory=self._tiers.out_of_memory,
            tiers=self._tiers.statistics(),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if the cache contradicts itself or its sequences."""
        self._tree.check()
        entries = {node.entry for node in self._tree.nodes() if node.entry is not None}
        assert entries == self._kept, "the tree and the list of what is kept differ"
        assert len(self._kept) <= self._max_states, "too many prefixes are kept"
        assert len({id(kept.sequence) for kept in self._kept}) == len(self._kept), "a sequence is kept twice"
        for kept in self._kept:
            sequence = kept.sequence
            assert kept.node.entry is kept, "a kept prefix is at another node"
            assert not kept.is_gone, "a prefix that was let go is listed"
            assert not sequence.is_released, "the sequence of a kept prefix was released"
            assert sequence.pending is None, "the sequence of a kept prefix has a pending tree"
            assert sequence.length == kept.node.length, "a kept prefix has another length than its tokens"
            assert kept.num_pins >= 0, "a pin was given back twice"

    def _longest(self, found: Iterable[Node[Kept]], namespace: str, ids: Array) -> tuple[Kept | None, int]:
        """The kept prefix that a prompt begins with, and how much of it.

        found: the nodes along the prompt.
        """
        entries = [node.entry for node in found if node.entry is not None and node.length < len(ids)]
        held = entries[-1] if entries else None
        length = held.node.length if held else 0
        if not self._is_recurrent:
            longer, common = self._tree.nearest(namespace, ids)
            common = min(common, len(ids) - 1)
            if longer is not None and common > length and self._least(longer) <= common:
                held, length = longer, common
        return held, length

    def _least(self, kept: Kept) -> int:
        """The least part of a kept prefix that a sequence can begin with, if no layer is recurrent."""
        if self._truncates_anywhere:
            return 0
        with self._memory.contents() as cache:
            return cache.least_length(kept.sequence)

    def _use(self, kept: Kept) -> None:
        kept.uses = self._uses(kept) + 1
        kept.last_use = self._prompts

    def _uses(self, kept: Kept) -> float:
        """Uses, each counting half after HALF_LIFE further prompts."""
        return float(kept.uses * 0.5 ** ((self._prompts - kept.last_use) / HALF_LIFE))

    def _worth(self, kept: Kept) -> float:
        """The prefix's value: the tokens to compute again without it, times its uses."""
        ancestor = _ancestor(kept)
        return self._uses(kept) * (kept.node.length - (ancestor.node.length if ancestor else 0))

    def _evict_one(self, free: CacheSize = NOTHING, need: CacheSize = NOTHING) -> bool:
        """Evicts the least valuable prefix without a pin, preferably one that frees what is needed."""
        loose = sorted((kept for kept in self._kept if not kept.num_pins), key=self._worth)
        if not loose:
            return False

        def helps(kept: Kept) -> bool:
            return self._memory.freed_by([kept.sequence]).helps(free, need)

        victim = next((kept for kept in loose if helps(kept)), loose[0])
        self._evict(victim)
        return True

    def _evict(self, victim: Kept) -> None:
        self._tiers.take(victim.namespace, victim.node.token_ids, victim.sequence)
        self._remove(victim)
        self._evictions += 1

    def _begun(self, kept: Kept, length: int) -> Sequence:
        """A sequence with the first `length` tokens of a kept prefix."""
        self._use(kept)
        self._hits += 1
        sequence = self._memory.fork(kept.sequence)
        if length < sequence.length:
            with self._memory.contents() as cache:
                cache.truncate(sequence, length)
        return sequence

    def _restore(self, namespace: str, ids: Array, held: Kept | None, start: int) -> Kept | None:
        """A prefix from a tier, kept from now on. It must have a block more than the `start` tokens held."""
        length = self._tiers.longest(namespace, ids, len(ids) - 1) if self._max_states else 0
        if length < start + BLOCK_POSITIONS:
            return None
        if held:
            held.num_pins += 1
        try:
            with self._memory.contents() as cache:
                need = cache.need_of_written(length, start // BLOCK_POSITIONS)
            is_room = self.make_room(need)
            if not is_room or (len(self._kept) >= self._max_states and not self._evict_one()):
                return None
            # The eviction that made room may have pushed the prefix out of its tier.
            base = held.sequence if held else None
            sequence = self._tiers.restored(namespace, ids, start, base)
        finally:
            if held:
                held.num_pins -= 1
        if sequence is None:
            return None
        self._restored += 1
        return self._enter(namespace, ids[: sequence.length], sequence)

    def _enter(self, namespace: str, ids: Array, sequence: Sequence) -> Kept:
        """Makes `sequence`, the cache's own from then on, a kept prefix."""
        node = self._tree.insert(namespace, ids)
        kept = Kept(node, namespace, sequence, 1.0, self._prompts)
        self._tree.set_entry(node, kept)
        self._kept.add(kept)
        return kept

    def _remove_parts(self, namespace: str, ids: Array) -> None:
        """Removes kept prefixes of `ids`, for a model that can begin with a part of a longer one."""
        for node in self._tree.find(namespace, ids)[0]:
            if node.entry is not None and not node.entry.num_pins:
                self._remove(node.entry)

    def _remove(self, kept: Kept) -> None:
        kept.node.entry = None
        self._tree.tidy(kept.node)
        self._drop(kept)

    def _drop(self, kept: Kept) -> None:
        kept.is_gone = True
        self._kept.remove(kept)
        self._memory.release(kept.sequence)


def _ancestor(kept: Kept) -> Kept | None:
    """The longest other prefix that `kept` continues and that is kept too."""
    above = (node.entry for node in kept.node.path if node is not kept.node)
    return next((entry for entry in above if entry is not None), None)


def _as_array(token_ids: TokenIds[int]) -> Array:
    if not len(token_ids):
        raise InvalidRequestError("a prompt without tokens has nothing to begin with: give at least one")
    return np.asarray(token_ids, np.int32)


def choose_checkpoints(
    start: int,
    length: int,
    *,
    parting: int,
    boundaries: Iterable[int],
    max_replay: int,
    limit: int,
) -> tuple[int, ...]:
    """At most `limit` positions, ascending, of a prompt of `length` tokens of which `start` are held.

    All lie between `start` and `length`, as a prompt needs its last token computed.

    parting: how many of the first tokens other prompts began with.
    boundaries: ends of a system prompt, of tools, of messages.

    As far as the limit allows, no checkpoint is more than `max_replay` tokens behind the one before, and one
    is at the end. If there are too many, these go first, in this order:

    - the prefix that other prompts have
    - the part up to the last boundary
    - the whole prompt
    - the part up to the first boundary
    """
    end = length - 1
    inside = sorted({each for each in boundaries if start < each <= end})
    wanted = [(min(parting, end), MIN_GAP)]
    wanted += [(each, MIN_GAP) for each in inside[-1:]]
    wanted.append((end, MIN_GAP))
    wanted += [(each, MIN_GAP) for each in inside[:1]]
    wanted += [(each, BLOCK_POSITIONS) for each in inside[1:-1]]
    checkpoints: list[int] = []
    for position, gap in wanted:
        if (
            len(checkpoints) < limit
            and position > start
            and all(abs(position - each) >= gap for each in (start, *checkpoints))
        ):
            checkpoints.append(position)
    checkpoints.sort()
    spacing = max_replay
    while len(between := _between(start, checkpoints, spacing)) > limit - len(checkpoints):
        spacing *= 2
    return tuple(sorted([*checkpoints, *between]))


def _between(start: int, checkpoints: list[int], spacing: int) -> list[int]:
    """Positions between `start` and the last checkpoint such that no gap is longer than `spacing`."""
    result: list[int] = []
    before = start
    for checkpoint in checkpoints:
        while checkpoint - before > spacing:
            # The end of a block, where it may be, as a sequence that goes on then copies no block.
            whole = (before + spacing) // BLOCK_POSITIONS * BLOCK_POSITIONS
            before = whole if whole > before else before + spacing
            result.append(before)
        before = checkpoint
    return result
