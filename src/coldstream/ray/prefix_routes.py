"""Which replica a request goes to: the one that was sent the longest prefix of its prompt, unless it is busy.

Pure, but for a lock: knows replicas by their names, prompts by the keys of their blocks, and nothing of Ray.
What a replica really keeps is its own affair; a wrong guess costs time and changes no token.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from coldstream.errors import ConfigError, shown

BLOCK_TOKENS: Final = 32
MAX_BLOCKS: Final = 1 << 16  # blocks that are remembered of a replica: two million tokens in about 10 MB
MAX_LEAD: Final = 8  # requests that a replica may serve beyond those of the idlest, for the sake of a prefix
_KEY_BYTES: Final = 8


def block_keys(namespace: str, token_ids: Sequence[int]) -> tuple[int, ...]:
    """A key for each whole block of a prompt, which stands for all tokens up to its end.

    namespace: requests of different ones share no key. Two prompts share as many keys as they begin with
    equal blocks. token_ids: below 2**32.
    """
    ids = array("I", token_ids)
    parent = blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()
    keys = []
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = blake2b(
            parent + ids[start : start + BLOCK_TOKENS].tobytes(), digest_size=_KEY_BYTES
        ).digest()
        keys.append(int.from_bytes(parent))
    return tuple(keys)


class _RoutedReplica:
    """What one replica was sent, and what it has to do."""

    def __init__(self) -> None:
        # The last used blocks at the end, a prompt's first block behind its later ones. So what is forgotten
        # first are ends of prompts, and a block is there only with all blocks before it.
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.load = 0
        self.chosen_at = 0

    def match(self, keys: Sequence[int]) -> int:
        """How many of the keys, from the first, are here."""
        for count, key in enumerate(keys):
            if key not in self.blocks:
                return count
        return len(keys)

    def note(self, keys: Sequence[int], max_blocks: int) -> None:
        for key in reversed(keys[:max_blocks]):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > max_blocks:
            self.blocks.popitem(last=False)


class PrefixRoutes:
    """The routes of the requests of one server. For any thread."""

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_lead: int = MAX_LEAD) -> None:
        """max_blocks: remembered of each replica. max_lead: see `MAX_LEAD`. Raises ConfigError."""
        for name, value, low in (("max_blocks", max_blocks, 1), ("max_lead", max_lead, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} must be a whole number from {low} on, not {shown(value)}")
        self._max_blocks = max_blocks
        self._max_lead = max_lead
        self._lock = threading.Lock()
        self._replicas: dict[str, _RoutedReplica] = {}
        self._routes: dict[int, str] = {}  # routes of requests that have not ended
        self._num_choices = 0

    def choose(self, request_id: int, keys: Sequence[int], replicas: Sequence[str]) -> str:
        """The replica for a request, one of the given ones, of which there must be one at least.

        It counts as its load until `release`, and its prompt as sent there. Asked again for the same request,
        the replica chosen before has not taken it, and is chosen again only if it is the last one. All of
        other replicas than the given ones is forgotten.
        """
        with self._lock:
            self._keep_only(replicas)
            former = self._release(request_id)
            names = [name for name in self._replicas if name != former] or [*self._replicas]
            idlest = min(self._replicas[name].load for name in names)
            near = [name for name in names if self._replicas[name].load - idlest <= self._max_lead]
            name = max(near, key=lambda name: self._rank(self._replicas[name], keys))
            self._num_choices += 1
            self._routes[request_id] = name
            chosen = self._replicas[name]
            chosen.load += 1
            chosen.chosen_at = self._num_choices
            chosen.note(keys, self._max_blocks)
            return name

    def release(self, request_id: int) -> None:
        """A request has ended; unknown ones are ignored."""
        with self._lock:
            self._release(request_id)

    def route_of(self, request_id: int) -> str | None:
        """The replica of a request that has not ended; None if it has none yet, or lost it."""
        with self._lock:
            return self._routes.get(request_id)

    def loads(self) -> dict[str, int]:
        """Requests that each replica serves."""
        with self._lock:
            return {name: replica.load for name, replica in self._replicas.items()}

    def num_blocks(self) -> dict[str, int]:
        """Blocks that are remembered of each replica."""
        with self._lock:
            return {name: len(replica.blocks) for name, replica in self._replicas.items()}

    def _rank(self, replica: _RoutedReplica, keys: Sequence[int]) -> tuple[int, int, int]:
        return replica.match(keys), -replica.load, -replica.chosen_at

    def _release(self, request_id: int) -> str | None:
        name = self._routes.pop(request_id, None)
        if name is not None:
            self._replicas[name].load -= 1
        return name

    def _keep_only(self, names: Sequence[str]) -> None:
        gone = self._replicas.keys() - set(names)
        if gone:
            self._routes = {one: name for one, name in self._routes.items() if name not in gone}
            for name in gone:
                del self._replicas[name]
        for name in names:
            if name not in self._replicas:
                self._replicas[name] = _RoutedReplica()
