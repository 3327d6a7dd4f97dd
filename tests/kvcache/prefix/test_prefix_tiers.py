"""Prefixes that come back from tiers: the same bytes, under a budget, by any order of calls."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prefix_memory import KINDS, Memory, Source, ids_of

from bench.runners import open_cpu_runner
from cache_shape import Shape
from coldstream.assets import demo_model_path
from coldstream.errors import InvalidRequestError, OutOfMemoryError
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache import CacheSize, PrefixCache, Sequence, SequenceCache
from coldstream.kvcache.cache_bytes import block_bytes, state_bytes_of
from coldstream.kvcache.prefix.disk_tier import PrefixDisk
from coldstream.kvcache.prefix.pages import PageIndex, PageKeys
from coldstream.kvcache.prefix.ram_tier import PrefixRam
from coldstream.kvcache.prefix.tiers import PrefixTier
from host_device import HostMemory

PARTS = st.tuples(st.sampled_from((1, 2)), st.sampled_from((1, 20, 255, 256, 257, 400)))
PROMPTS = st.lists(PARTS, min_size=1, max_size=4).map(
    lambda parts: [token for token, count in parts for _ in range(count)]
)
IDENTITY = b"a model"


def text(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def computed(cache: PrefixCache, memory: Memory, ids: list[int], namespace: str = "") -> int:
    """Computes a prompt as the engine does, whose held tokens are checked. Returns their number."""
    prefix = cache.begin(ids, (), namespace)
    memory.check(prefix.sequence, ids)
    for end in (*prefix.checkpoints, len(ids)):
        need = memory.need(prefix.sequence, end - prefix.sequence.length)
        if not cache.make_room(need):
            break
        memory.extend(prefix.sequence, ids[:end])
        if end < len(ids):
            cache.keep(ids, prefix.sequence, namespace)
    memory.release(prefix.sequence)
    return prefix.length


def check_no_page_is_left_over(tier: PrefixRam | PrefixDisk) -> None:
    pages = {key: page for key, (page, _) in tier._index._pages.items()}
    roots = {tier._keys(namespace).root for namespace in ("", "other key")}
    assert all(page.parent in pages or page.parent in roots for page in pages.values())


class Tiers(RuleBasedStateMachine):
    """Whatever is begun with holds its own tokens, and no tier takes more than its budget."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()

    @initialize(
        max_states=st.integers(1, 4),
        kilobytes=st.tuples(*[st.sampled_from((0, 60, 200, 2000))] * 2),
        which=st.sampled_from(("ram", "disk", "both")),
        kind=st.sampled_from(KINDS),
    )
    def open(self, max_states: int, kilobytes: tuple[int, int], which: str, kind: str) -> None:
        self.max_states, self.budgets, self.which = max_states, [1000 * each for each in kilobytes], which
        self.kind = kind
        self.restart()

    def restart(self) -> None:
        self.memory = Memory(14, 6, self.kind)
        tiers: list[PrefixTier] = []
        if self.which != "disk":
            tiers.append(PrefixRam(self.budgets[0]))
        if self.which != "ram":
            tiers.append(PrefixDisk(Path(self.folder.name), IDENTITY, self.budgets[1]))
        self.cache = PrefixCache(self.memory, max_states=self.max_states, tiers=tiers)

    @rule(namespace=st.sampled_from(("", "other key")), ids=PROMPTS)
    def prompt(self, namespace: str, ids: list[int]) -> None:
        computed(self.cache, self.memory, ids, namespace)

    @rule()
    def idle(self) -> None:
        self.cache.save_one()

    @rule(num_blocks=st.integers(0, 14))
    def make_room(self, num_blocks: int) -> None:
        self.cache.make_room(CacheSize(num_blocks, 1))

    @rule(namespace=st.sampled_from((None, "", "other key")))
    def clear(self, namespace: str | None) -> None:
        self.cache.clear(namespace)
        assert self.cache.begin(text(0, 600), (), namespace or "").length == 0

    @rule(is_clean=st.booleans())
    def begin_again(self, is_clean: bool) -> None:
        if is_clean:
            self.cache.close()
            assert self.memory.free == self.memory.size
        else:
            for tier in self.cache._tiers._tiers:
                tier.close()
        self.restart()

    @invariant()
    def budgets_hold(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        for kept in self.cache._kept:
            self.memory.check(kept.sequence, kept.node.token_ids)
        for tier in self.cache.statistics().tiers:
            assert tier.num_bytes <= tier.budget_bytes
            assert tier.damaged == 0
            assert not tier.problem
        for owner in self.cache._tiers._tiers:
            check_no_page_is_left_over(owner)
        for tier in self.cache.statistics().tiers:
            if tier.name == "disk":
                files = Path(self.folder.name).glob("*/*.prefix")
                assert sum(file.stat().st_size for file in files) == tier.num_bytes

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
            assert self.memory.free == self.memory.size
        self.folder.cleanup()


TestPrefixesComeBackFromTiers = Tiers.TestCase
TestPrefixesComeBackFromTiers.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)


@pytest.fixture
def memory() -> Memory:
    return Memory(num_blocks=20, num_states=8)


@pytest.fixture(params=["ram", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> PrefixTier:
    return PrefixRam(1 << 30) if request.param == "ram" else PrefixDisk(tmp_path, IDENTITY, 1 << 30)


def with_ram(memory: Memory, budget_bytes: int = 1 << 20) -> PrefixCache:
    return PrefixCache(memory, max_states=2, tiers=[PrefixRam(budget_bytes)])


def test_a_prefix_that_was_let_go_comes_back_from_ram(memory: Memory) -> None:
    cache = with_ram(memory)
    for start in (0, 2000, 4000):
        computed(cache, memory, text(start, 700))
    assert [computed(cache, memory, text(start, 701)) for start in (0, 2000, 4000)] == [699, 699, 699]
    assert cache.statistics().restored > 0


def test_pages_that_prefixes_have_in_common_are_saved_once(tier: PrefixTier) -> None:
    read: list[int] = []
    for length in (600, 1000, 512):
        source = Source(length)
        assert tier.save("", ids_of(length), source)
        read += source.read
    assert read == [0, 1, 2, 2, 3]
    assert tier.statistics().pages == 6


def test_what_does_not_fit_into_a_budget_pushes_nothing_out(tmp_path: Path) -> None:
    for tier in (PrefixRam(20_000), PrefixDisk(tmp_path, IDENTITY, 20_000)):
        assert tier.save("", ids_of(600), Source(600))
        before = tier.statistics()
        assert not tier.save("", ids_of(2000, 5000), Source(2000))
        assert tier.longest("", ids_of(700), 700) == 600
        assert tier.statistics() == before
        assert not tier.save("", ids_of(2000), Source(2000))
        assert tier.save("", ids_of(900, 5000), Source(900))
        assert tier.longest("", ids_of(700), 700) < 600
        assert tier.statistics().num_bytes <= 20_000


@pytest.mark.parametrize("first_block", [0, 1, 2])
def test_a_prefix_is_used_with_the_pages_that_its_reader_has_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_block: int
) -> None:
    monkeypatch.setattr("coldstream.kvcache.prefix.disk_tier.PART_BYTES", 1)  # a file of each page
    first, second, third = (ids_of(512, start) for start in (0, 10_000, 20_000))
    for kind in (PrefixRam, lambda budget: PrefixDisk(tmp_path, IDENTITY, budget)):
        tier = kind(1 << 24)
        assert tier.save("", first, Source(512))
        room = 2 * tier.statistics().num_bytes
        tier.close()
        tier = kind(room)
        for ids in (first, second):
            assert tier.save("", ids, Source(512))
        assert tier.load("", ids_of(513), 512, first_block) is not None
        assert tier.save("", third, Source(512))
        assert [tier.longest("", ids_of(513, start), 512) for start in (0, 10_000, 20_000)] == [512, 0, 512]
        tier.close()


def fill(folder: Path, *, restarts: bool) -> None:
    """Saves prefixes that continue each other beyond the budget, and checks what is left."""
    ram, disk = PrefixRam(25_000), PrefixDisk(folder, IDENTITY, 25_000)
    for number in range(40):
        length = 256 * (1 + number * 7 % 5)
        ids = ids_of(length, 10_000 * (number * 5 % 3))
        for tier in (ram, disk):
            assert tier.save("", ids, Source(length))
            tier.load("", ids_of(600, 10_000), 600, 0)
            check_no_page_is_left_over(tier)
        if restarts:
            disk.close()
            disk = PrefixDisk(folder, IDENTITY, 25_000)
            assert disk.statistics().damaged == 0
            check_no_page_is_left_over(disk)
        assert disk.longest("", ids, length) == ram.longest("", ids, length) == length
    assert ram.statistics().evicted > 0


def test_of_a_prefix_the_pages_that_others_continue_go_last(tmp_path: Path) -> None:
    """Otherwise those after them would take room and never be found."""
    fill(tmp_path, restarts=False)


def test_the_order_in_which_pages_go_survives_restarts(tmp_path: Path) -> None:
    fill(tmp_path, restarts=True)


def test_with_ram_a_partial_hit_replays_at_most_2048_tokens_though_states_are_few() -> None:
    memory = Memory(num_blocks=60, num_states=4)
    cache = with_ram(memory, 1 << 24)
    computed(cache, memory, text(0, 9000))
    assert cache.statistics().kept == 2
    for parting in (8999, 8100, 6200, 4100, 3000, 2100):
        held = computed(cache, memory, text(0, parting) + text(20_000, 100))
        assert parting - held <= 2048


def test_what_is_let_go_goes_to_the_fastest_tier_and_idle_moments_serve_the_others(tmp_path: Path) -> None:
    memory = Memory(num_blocks=20, num_states=8)
    disk = PrefixDisk(tmp_path, IDENTITY, 1 << 24)
    cache = PrefixCache(memory, max_states=4, tiers=[PrefixRam(1 << 24), disk])
    computed(cache, memory, text(0, 700))
    assert cache.make_room(CacheSize(20, 8))
    assert [tier.saved for tier in cache.statistics().tiers] == [1, 0]
    computed(cache, memory, text(2000, 700))
    assert cache.save_one()
    assert [tier.saved for tier in cache.statistics().tiers] == [1, 1]
    cache.close()


class Failing(Source):
    """The machine's memory runs out at one of the reads."""

    def __init__(self, length: int, num_reads: int) -> None:
        super().__init__(length)
        self.num_reads = num_reads

    def read_block(self, index: int) -> bytes:
        if len(self.read) == self.num_reads:
            raise MemoryError
        return super().read_block(index)


@pytest.mark.parametrize("num_reads", range(4))
def test_a_save_that_ends_at_any_read_leaves_pages_in_order(
    tmp_path: Path, num_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coldstream.kvcache.prefix.disk_tier.PART_BYTES", 3000)
    for tier in (PrefixRam(20_000), PrefixDisk(tmp_path, IDENTITY, 20_000)):
        assert tier.save("", ids_of(256), Source(256))
        with pytest.raises(MemoryError):
            tier.save("", ids_of(1000, start=9000), Failing(1000, num_reads))
        assert tier.longest("", ids_of(1000, start=9000), 1000) == 0
        for number in range(8):
            assert tier.save("", ids_of(300, start=20_000 * number), Source(300))
            check_no_page_is_left_over(tier)
        assert tier.save("", ids_of(1000, start=9000), Source(1000))
        assert tier.longest("", ids_of(1000, start=9000), 1000) == 1000


def test_without_memory_for_its_bytes_a_prefix_is_just_let_go(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it is made to fail as it does when memory has run out."""
    cache = with_ram(memory)
    computed(cache, memory, text(0, 700))

    def run_out(*_: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("coldstream.kvcache.sequence_cache.read_block", run_out)
        assert cache.make_room(CacheSize(20, 8))
    assert cache.statistics().out_of_memory == 1
    assert computed(cache, memory, text(0, 700)) == 0
    assert cache.make_room(CacheSize(20, 8))
    assert computed(cache, memory, text(0, 700)) == 699


def test_a_prefix_that_another_is_restored_upon_stays(memory: Memory) -> None:
    """There would be room for the longer one only without it."""
    cache = with_ram(memory)
    computed(cache, memory, text(0, 4000))
    assert cache.make_room(CacheSize(20, 8))
    base, other = memory.new_sequence(), memory.new_sequence()
    memory.extend(base, text(0, 260))
    cache.keep(text(0, 260), base)
    memory.release(base)
    memory.extend(other, text(7000, 1024))
    assert cache.begin(text(0, 4100)).length == 260
    memory.release(other)
    assert cache.begin(text(0, 4100)).length == 3999
    cache.check_integrity()


def test_pc03_an_equal_hash_of_other_tokens_is_never_a_hit(memory: Memory) -> None:
    ram = PrefixRam(1 << 20, digest=lambda content: content[:1])
    cache = PrefixCache(memory, max_states=2, tiers=[ram])
    for start in (0, 2000, 4000, 0, 2000):
        computed(cache, memory, text(start, 700))
        cache.make_room(CacheSize(20, 8))
    cache.check_integrity()


def test_pages_with_one_key_are_distinguished_by_their_tokens() -> None:
    keys = PageKeys(b"root", digest=lambda content: b"the same")
    index: PageIndex[str] = PageIndex()
    ids = np.arange(100, dtype=np.int32)
    assert index.add(keys.end(b"root", ids), "first")
    assert not index.add(keys.end(b"root", ids + 1), "second")
    assert keys.end(b"root", ids + 1) not in index
    assert index.longest(keys, ids + 1, 100) is None


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("kv_type", ["i16", "f16", "i4"])
@pytest.mark.parametrize("length", [1, 255, 256, 300])
@pytest.mark.parametrize("window", [None, 30, 290])
def test_bytes_of_sequences_are_those_of_any_device(kv_type: str, length: int, window: int | None) -> None:
    """A GPU's arrays and NumPy's give and take the same bytes, those of layers with windows among them."""
    size, shape = CacheSize(4, 3), Shape(kv_heads=((2, 32),))
    if window:
        size = CacheSize(4, 3, num_window_blocks=9)
        shape = Shape(("delta_net", "attention", "attention"), ((2, 32), (1, 32)), (None, window))
    host = SequenceCache(shape, CpuOps(1), size, kv_type) if kv_type != "f16" else None
    device = SequenceCache(shape, device_ops(), size, kv_type)
    source = device.new()
    random = np.random.default_rng(3)
    source = written(device, length, random)
    contents = [device.read_block(source, index) for index in range(len(source.blocks))]
    state = device.read_state(source)
    for cache in (device, host):
        if cache is not None:
            copy = cache.written(length, contents, state)
            assert [cache.read_block(copy, index) for index in range(len(copy.blocks))] == contents
            assert cache.read_state(copy) == state
            cache.release(copy)
            assert cache.free.num_states == (2 if cache is device else 3)


def device_ops() -> CudaOps:
    return CudaOps(HostMemory(), 1, 1)


def written(cache: SequenceCache, length: int, random: np.random.Generator) -> Sequence:
    """A sequence of random bytes, none of which is a NaN."""
    sizes = [min(BLOCK_POSITIONS, length - start) for start in range(0, length, BLOCK_POSITIONS)]

    def content(num_bytes: int) -> bytes:
        return random.integers(0, 60, num_bytes, np.uint8).tobytes()

    blocks = [content(block_bytes(cache.tensors, size)) for size in sizes]
    return cache.written(length, blocks, content(cache.state_bytes(length)))


@pytest.mark.usefixtures("host")
def test_only_committed_positions_are_exported() -> None:
    """What lies behind them may be another caller's."""
    cache = SequenceCache(Shape(), device_ops(), CacheSize(4, 3), "f32")
    first = written(cache, 256, np.random.default_rng(1))
    block = first.blocks[0]
    cache.release(first)
    second = written(cache, 10, np.random.default_rng(2))
    assert second.blocks == [block]
    assert len(cache.read_block(second, 0)) == block_bytes(cache.tensors, 10)


@pytest.mark.usefixtures("host")
def test_bytes_that_do_not_fit_change_nothing() -> None:
    cache = SequenceCache(Shape(), device_ops(), CacheSize(2, 1), "f32")
    block, state = bytes(block_bytes(cache.tensors)), bytes(state_bytes_of(cache.tensors))
    for length, blocks, of_state in (
        (256, [block[1:]], state),
        (257, [block, block], state),
        (512, [block, block], state[1:]),
        (256, [block, block], state),
        (0, [], state),
    ):
        with pytest.raises(InvalidRequestError, match="not those of"):
            cache.written(length, blocks, of_state)
    with pytest.raises(OutOfMemoryError):
        cache.written(768, [block] * 3, state)
    assert cache.free == CacheSize(2, 1)
    other = cache.written(512, [block] * 2, state)
    with pytest.raises(OutOfMemoryError):
        cache.written(512, [block], state, other)
    assert cache.free == CacheSize(0, 0)


def test_a_prefix_from_a_tier_gives_the_bits_of_a_cold_run(tier: PrefixTier) -> None:
    """The bundled model; the second prompt shares the blocks that are held, and takes the others."""
    size = CacheSize(num_blocks=12, num_states=4)
    with open_cpu_runner(demo_model_path(), threads=2, context_length=2048, cache_size=size) as runner:
        ids = np.random.default_rng(5).integers(0, runner.spec.vocab_size, 1100).tolist()
        cold = runner.logits(ids)[-1]
        cache = PrefixCache(runner, max_states=4, tiers=[tier])
        sequence = runner.new_sequence()
        for length in (300, 1000):
            runner.extend(sequence, ids[sequence.length : length])
            cache.keep(ids, sequence)
        runner.release(sequence)
        assert cache.make_room(CacheSize(12, 4))
        for least in (300, 1000):
            prefix = cache.begin(ids[: least + 1])
            assert prefix.length == least
            runner.release(prefix.sequence)
        prefix = cache.begin(ids)
        assert np.array_equal(runner.extend(prefix.sequence, ids[prefix.length :]), cold)
        assert torch.isfinite(torch.from_numpy(cold)).all()
        runner.release(prefix.sequence)
        cache.close()
        assert runner.free == size


@pytest.mark.parametrize("kind", ["windows", "none"])
def test_only_what_is_common_is_shared_with_a_longer_prefix(kind: str) -> None:
    """What is kept has more tokens than the prompt has in common with it, and a tier has the prompt's own."""
    memory = Memory(20, 4, kind)
    cache = PrefixCache(memory, max_states=3, tiers=[PrefixRam(10**8)])
    common = text(0, 300)
    first, second = common + text(1000, 500), common + text(2000, 600)
    computed(cache, memory, second)
    assert cache.make_room(CacheSize(20, 4))
    computed(cache, memory, first)
    assert computed(cache, memory, second + text(5000, 9)) == len(second) - 1
    cache.close()
    assert memory.free == memory.size
