"""ExpertCache: which expert lies in which slot of fast memory, step after step. Pure: no I/O, no clock.

The unit of work is a step: a launch that reads experts through a table which does not change meanwhile.
Steps may overlap: the caller starts step t + 1 before it knows what step t used. The table changes only
where a step starts. An expert enters it after its copy has ended. The slot of an expert that leaves it is
overwritten only by copies that wait for the last step that could read it. An expert outside the table is
computed elsewhere, so the cache changes speed, never results.

    start = cache.start_step()      # change the table, start the copies, launch
    cache.copied(copy)              # at any time
    cache.finish_step(step, used)   # may admit and evict experts, from the next start on

An expert is a number, layer · num_experts + expert. Experts of the same size share slots, numbered from 0 in
each size.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np

from coldstream.experts.expert_map import ExpertUses
from coldstream.experts.slots.slot_pool import SlotPool
from coldstream.placement.policies import Policy

Array = np.ndarray[Any, Any]


class Copy(NamedTuple):
    """A transfer of `expert` into `slot`, to begin after step `after_step`, the last that may read the slot.

    after_step: None if there is none. generation: number of the slot's owner; makes copies distinct.
    """

    expert: int
    slot: int
    generation: int
    after_step: int | None


@dataclass(frozen=True)
class StepStart:
    """What has to be done where step `step` starts.

    arrived, slots: int64 [n], experts that may be read from this step on, and their slots. withdrawn: int64
    [m], experts that may no longer be read; left: int64 [m], the slots where their bytes are until `copies`.
    copies: to be queued now, each behind its `after_step`.
    """

    step: int
    arrived: Array
    slots: Array
    withdrawn: Array
    left: Array
    copies: tuple[Copy, ...]


class Counters:
    """Counts by layer, int64 [layers] each. Uses in steps that do not train are not counted.

    hits, misses: uses of experts that the step could read, or not. whole_steps: steps that used experts of
    the layer and missed none. copies, copied_bytes: copies that began. failed_copies: copies that failed.
    evictions: experts withdrawn.
    """

    def __init__(self, num_layers: int) -> None:
        self.hits = np.zeros(num_layers, np.int64)
        self.misses = np.zeros(num_layers, np.int64)
        self.whole_steps = np.zeros(num_layers, np.int64)
        self.copies = np.zeros(num_layers, np.int64)
        self.copied_bytes = np.zeros(num_layers, np.int64)
        self.failed_copies = np.zeros(num_layers, np.int64)
        self.evictions = np.zeros(num_layers, np.int64)

    @property
    def totals(self) -> tuple[int, int]:
        """Hits and misses of all layers."""
        return int(self.hits.sum()), int(self.misses.sum())


class ExpertCache:
    """The slots, the experts in them, and the admissions that `policy` decides.

    layer_bytes: bytes of an expert, by layer. num_slots: by bytes of an expert; a size without an entry has
    no slot. profile: expected uses per step, float [layers, experts], or None. max_bytes_per_step: limit on
    the bytes in flight after a step's start, and so on copies that begin there. None: no limit.
    """

    def __init__(
        self,
        layer_bytes: Sequence[int],
        num_experts: int,
        num_slots: Mapping[int, int],
        policy: Policy,
        *,
        profile: Array | None = None,
        max_bytes_per_step: int | None = None,
    ) -> None:
        num_layers = len(layer_bytes)
        size = num_layers * num_experts
        self.counters = Counters(num_layers)
        self.uses = ExpertUses(num_layers, num_experts)
        if unknown := set(num_slots) - set(layer_bytes):
            raise ValueError(f"no expert has {sorted(unknown)} bytes")
        self._num_experts = num_experts
        self._policy = policy
        self._max_bytes = max_bytes_per_step
        self._expert_bytes = np.repeat(np.array(layer_bytes, np.int64), num_experts)
        self._pools = {each: SlotPool(each, num_slots.get(each, 0)) for each in sorted(set(layer_bytes))}
        self._pool_of = [self._pools[each] for each in layer_bytes]  # by layer
        self._of_size = {each: self._expert_bytes == each for each in self._pools}
        self._slot = np.full(size, -1)  # of experts that are loading or ready
        self._absent = np.ones(size, bool)  # not loading, ready, wanted or failed for good
        self._readable = np.zeros(size, bool)  # by the next step, as decided so far
        self._wanted: deque[int] = deque()  # to be copied, in this order
        self._failed_once: set[int] = set()
        self._arrived: list[int] = []
        self._withdrawn: dict[int, int] = {}  # experts, and the slots that they leave
        self._bytes_in_flight = 0
        self._last_started = self._last_finished = -1
        self._tables: deque[Array] = deque()  # what each unfinished step may read
        self._last_used = np.empty(0, np.int64)
        policy.start(np.zeros(size) if profile is None else profile.reshape(size).astype(np.float64))

    @property
    def scores(self) -> Array:
        """What the policy expects of each expert, by number. Changes with every step that it observes."""
        return self._policy.scores

    def load(self, experts: Iterable[int]) -> tuple[Copy, ...]:
        """The copies that load experts before the first step; `max_bytes_per_step` does not apply.

        The first experts of a size get its lowest slots, which `resize` removes last. ValueError, with
        nothing changed, if an expert is not absent or there is no slot for it.
        """
        chosen = np.fromiter(experts, np.int64)
        self._check(chosen)
        if not self._absent[chosen].all():
            raise ValueError("an expert is already in a slot or on its way")
        for each, pool in self._pools.items():
            count = int(np.count_nonzero(self._of_size[each][chosen]))
            if count > pool.num_free:
                raise ValueError(f"{count} experts of {each} bytes for {pool.num_free} free slots")
        self._absent[chosen] = False
        return self._begin(chosen.tolist())

    def start_step(self) -> StepStart:
        """Called right before a step is launched."""
        self._last_started += 1
        arrived = np.array(self._arrived, np.int64)
        withdrawn = np.fromiter(self._withdrawn.keys(), np.int64)
        left = np.fromiter(self._withdrawn.values(), np.int64)
        self._arrived, self._withdrawn = [], {}
        self._readable[arrived] = True
        self._tables.append(self._readable.copy())
        copies = self._begin(self._due())
        return StepStart(self._last_started, arrived, self._slot[arrived], withdrawn, left, copies)

    def copied(self, copies: Iterable[Copy]) -> None:
        """Takes note that copies have ended and write no more; what is said again has no effect."""
        for expert, index, generation, _ in copies:
            pool = self._pool(expert)
            if not pool.is_loading(index, generation):
                continue
            self._bytes_in_flight -= pool.slot_bytes
            self._failed_once.discard(expert)
            if pool.complete(index):
                self._arrived.append(expert)
            else:
                self._forget(expert)

    def failed(self, copy: Copy) -> bool:
        """Takes note that a copy has failed and writes no more; a second call for it has no effect.

        It is begun again at a later start. False if it fails a second time: the expert is never admitted
        again, and the caller should raise an error; the cache stays usable.
        """
        expert, index, generation, _ = copy
        pool = self._pool(expert)
        if not pool.is_loading(index, generation):
            return True
        self._bytes_in_flight -= pool.slot_bytes
        pool.release(index)
        self._slot[expert] = -1
        self.counters.failed_copies[expert // self._num_experts] += 1
        if expert in self._failed_once:
            return False  # still not absent, so that no later step admits it
        self._failed_once.add(expert)
        self._wanted.appendleft(expert)
        self._drop_unplaced(pool)
        return True

    def drop(self, copy: Copy) -> None:
        """Takes note that a copy cannot begin, as the expert's bytes are not at hand: it is absent again."""
        pool, layer = self._pool(copy.expert), copy.expert // self._num_experts
        pool.release(copy.slot)
        self._bytes_in_flight -= pool.slot_bytes
        self.counters.copies[layer] -= 1
        self.counters.copied_bytes[layer] -= pool.slot_bytes
        self._forget(copy.expert)

    def finish_step(self, step: int, used: Array, *, trains: bool = True) -> None:
        """Step `step` has ended and used these experts, int64 [n], each once. Steps end in order.

        trains: whether the policy learns from them; not from a prefill or a step that failed, whose uses
        admit and evict nothing. ValueError for another step or for experts out of range or repeated.
        """
        if step != self._last_finished + 1 or step > self._last_started:
            raise ValueError(f"step {step} cannot end: {self._last_finished} ended last")
        self._check(used)
        self._last_finished = step
        table = self._tables.popleft()
        for pool in self._pools.values():
            pool.finish(step)
        if not trains:
            return
        self._last_used = used
        self._count_uses(used, table[used])
        self.uses.observe(used)
        self._policy.observe(used)
        missed = used[self._absent[used]]
        self._admit(missed[np.lexsort((missed, -self._policy.scores[missed]))])

    def resize(self, expert_bytes: int, num_slots: int) -> None:
        """Sets the number of slots of a size. Experts in removed slots are withdrawn at the next start.

        The memory of removed slots may be reused once `reclaimed` is true: after the last step launched
        before that start, and after the copies in flight.
        """
        pool = self._pools[expert_bytes]
        self._withdraw(np.array(pool.resize(num_slots), np.int64))
        self._drop_unplaced(pool)

    def reclaimed(self, expert_bytes: int) -> bool:
        """Whether no step reads and no copy writes the slots that `resize` removed."""
        return self._pools[expert_bytes].reclaimed

    def _pool(self, expert: int) -> SlotPool:
        return self._pool_of[expert // self._num_experts]

    def _check(self, experts: Array) -> None:
        """ValueError for numbers out of range or repeated."""
        size = self._absent.size
        if experts.size == 0 or (
            experts[0] >= 0 and experts[-1] < size and (experts[1:] > experts[:-1]).all()
        ):
            return  # those of a step ascend, and are checked after each
        if not 0 <= experts.min() <= experts.max() < size:
            raise ValueError(f"expert numbers must be in [0, {size})")
        seen = np.zeros(size, bool)
        seen[experts] = True
        if np.count_nonzero(seen) != experts.size:
            raise ValueError("an expert is named twice")

    def _count_uses(self, used: Array, held: Array) -> None:
        hits, misses = self._by_layer(used[held]), self._by_layer(used[~held])
        self.counters.hits += hits
        self.counters.misses += misses
        self.counters.whole_steps += (hits > 0) & (misses == 0)

    def _admit(self, candidates: Array) -> None:
        """Queues the candidates that the policy admits, in their order, within the byte limit.

        Withdraws the experts that they replace, none of which the last step used.
        """
        if candidates.size == 0:
            return
        replaceable = self._readable.copy()
        replaceable[self._last_used] = False
        chosen = np.zeros(self._absent.size, bool)
        changes = {}
        for each, pool in self._pools.items():
            of_size = self._of_size[each]
            num_free = pool.num_free - self._num_wanted(pool)
            residents = (replaceable & of_size).nonzero()[0]
            changes[each] = self._policy.choose(candidates[of_size[candidates]], residents, num_free)
            chosen[changes[each].admitted] = True
        admitted = candidates[chosen[candidates]][: self._policy.max_copies]
        if self._max_bytes is not None:
            wanted_bytes = sum(self._pool(expert).slot_bytes for expert in self._wanted)
            admitted = admitted[np.cumsum(self._expert_bytes[admitted]) <= self._max_bytes - wanted_bytes]
        for each, change in changes.items():
            num_placed = change.admitted.size - change.evicted.size  # in free slots
            num_admitted = int(np.count_nonzero(self._of_size[each][admitted]))
            self._withdraw(change.evicted[: max(0, num_admitted - num_placed)])
        self._absent[admitted] = False
        self._wanted.extend(admitted.tolist())

    def _due(self) -> list[int]:
        """Takes from `_wanted` the experts that have a free slot and fit the byte limit."""
        num_free = {each: pool.num_free for each, pool in self._pools.items()}
        room = inf if self._max_bytes is None else self._max_bytes - self._bytes_in_flight
        due, waiting = [], deque[int]()
        for expert in self._wanted:
            each = self._pool(expert).slot_bytes
            if num_free[each] and each <= room:
                due.append(expert)
                num_free[each] -= 1
                room -= each
            else:
                waiting.append(expert)
                if num_free[each]:
                    room = 0  # otherwise smaller experts would overtake it forever
        self._wanted = waiting
        return due

    def _begin(self, experts: list[int]) -> tuple[Copy, ...]:
        """Takes a free slot for each expert; the copies into them."""
        if not experts:
            return ()
        copies = []
        for expert in experts:
            pool = self._pool(expert)
            index = pool.acquire(expert)
            slot = pool.slots[index]
            after_step = None if slot.last_reader < 0 else slot.last_reader
            copies.append(Copy(expert, index, slot.generation, after_step))
        self._slot[experts] = [copy.slot for copy in copies]
        by_layer = self._by_layer(np.array(experts, np.int64))
        num_bytes = by_layer * self._expert_bytes[:: self._num_experts]
        self._bytes_in_flight += int(num_bytes.sum())
        self.counters.copies += by_layer
        self.counters.copied_bytes += num_bytes
        return tuple(copies)

    def _withdraw(self, experts: Array) -> None:
        """Takes the slots of ready experts away from the next start on."""
        if experts.size == 0:
            return
        places = zip(
            experts.tolist(), self._slot[experts].tolist(), self._readable[experts].tolist(), strict=True
        )
        for expert, index, is_readable in places:
            pool = self._pool(expert)
            if is_readable:
                self._withdrawn[expert] = index
                pool.withdraw(index, self._last_started)
            else:
                self._arrived.remove(expert)
                pool.release(index)
        self._readable[experts] = False
        self.counters.evictions += self._by_layer(experts)
        self._forget(experts)

    def _by_layer(self, experts: Array) -> Array:
        """How many of the experts each layer has."""
        return np.bincount(experts // self._num_experts, minlength=len(self._pool_of))

    def _forget(self, experts: int | Array) -> None:
        """Marks experts as absent."""
        self._slot[experts] = -1
        self._absent[experts] = True

    def _num_wanted(self, pool: SlotPool) -> int:
        return sum(self._pool(expert) is pool for expert in self._wanted)

    def _drop_unplaced(self, pool: SlotPool) -> None:
        """Drops the last wanted experts for which there is no free slot."""
        mine = [expert for expert in self._wanted if self._pool(expert) is pool]
        for expert in mine[pool.num_free :]:
            self._wanted.remove(expert)
            self._absent[expert] = True
