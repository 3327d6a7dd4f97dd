"""Prefixes in files: what is damaged, foreign or half-written is a miss, and a full disk ends only saving."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefix_memory import Memory, Source, ids_of

from coldstream.errors import StorageError
from coldstream.kvcache import CacheSize, PrefixCache
from coldstream.kvcache.prefix.disk_tier import PrefixDisk
from coldstream.kvcache.prefix.file import DamagedFileError, PageContent, encode, parse
from coldstream.kvcache.prefix.pages import PageKeys, sha256
from coldstream.kvcache.prefix.tiers import SavedPrefix

IDENTITY = b"a model"
BUDGET = 1 << 20
LENGTH = 300  # of the prefix in most of the tests: a whole block and an end
WORKER = Path(__file__).with_name("prefix_disk_worker.py")


@contextmanager
def opened(folder: Path, identity: bytes = IDENTITY, budget: int = BUDGET) -> Iterator[PrefixDisk]:
    disk = PrefixDisk(folder, identity, budget)
    try:
        yield disk
    finally:
        disk.close()


def load(disk: PrefixDisk, length: int = LENGTH, namespace: str = "") -> SavedPrefix | None:
    return disk.load(namespace, ids_of(length + 1), length, 0)


def is_right(saved: SavedPrefix | None, length: int = LENGTH) -> bool:
    source = Source(length)
    blocks = [source.read_block(index) for index in range(-(-length // 256))]
    return saved is None or saved == SavedPrefix(length, blocks, source.read_state())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The only file of a folder, about 4 KB long, with one prefix."""
    with opened(tmp_path) as disk:
        assert disk.save("", ids_of(LENGTH), Source(LENGTH))
    (path,) = tmp_path.glob("*/*.prefix")
    return path


def test_a_prefix_survives_a_restart(tmp_path: Path, file: Path) -> None:
    with opened(tmp_path) as disk:
        assert disk.longest("", ids_of(1000), 1000) == LENGTH
        assert load(disk) is not None
        assert is_right(load(disk))
        assert disk.longest("", ids_of(1000), LENGTH - 1) == 0
        assert disk.longest("", ids_of(1000, start=1), 1000) == 0
        assert disk.statistics().num_bytes == file.stat().st_size


def test_ca06_every_byte_that_has_changed_makes_a_miss(tmp_path: Path, file: Path) -> None:
    whole = file.read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        file.write_bytes(changed)
        with opened(tmp_path) as disk:
            assert load(disk) is None
            assert disk.statistics().damaged == 1
        file.write_bytes(whole)
    with opened(tmp_path) as disk:
        assert load(disk) is not None


def test_ca06_a_file_that_was_truncated_or_grew_is_a_miss(tmp_path: Path, file: Path) -> None:
    whole = file.read_bytes()
    for content in (*(whole[:length] for length in range(0, len(whole), 7)), whole + b"\0", whole * 2):
        file.write_bytes(content)
        with opened(tmp_path) as disk:
            assert load(disk) is None
            assert disk.statistics().damaged == 1


def test_ca06_bytes_that_change_while_the_folder_is_open_are_a_miss_once(tmp_path: Path, file: Path) -> None:
    """The file is gone afterwards, and the prefix is saved again."""
    with opened(tmp_path) as disk:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        file.chmod(0o600)
        assert disk.longest("", ids_of(1000), 1000) == LENGTH
        assert load(disk) is None
        assert disk.longest("", ids_of(1000), 1000) == 0
        assert not file.exists()
        assert disk.statistics().num_bytes == 0
        assert disk.save("", ids_of(LENGTH), Source(LENGTH))
        assert load(disk) is not None


def test_ca06_a_file_that_vanishes_is_a_miss(tmp_path: Path, file: Path) -> None:
    with opened(tmp_path) as disk:
        file.unlink()
        assert load(disk) is None
        assert disk.statistics().damaged == 1


def test_trap_54_ca06_files_of_another_version_or_model_are_misses(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, b"another model") as disk:
        assert load(disk) is None
        assert disk.statistics().damaged == 0
        (folder,) = [each for each in tmp_path.iterdir() if each != file.parent]
    shutil.copy(file, folder)
    with opened(tmp_path, b"another model") as disk:
        assert load(disk) is None
        assert disk.statistics().damaged == 1
    monkeypatch.setattr("coldstream.kvcache.prefix.file.VERSION", 2)
    with opened(tmp_path) as disk:
        assert load(disk) is None
        assert disk.statistics().damaged == 1


def test_ca06_links_pipes_folders_and_files_others_may_write_to_are_not_opened(
    tmp_path: Path, file: Path
) -> None:
    outside = tmp_path / "outside"
    shutil.move(file, outside)
    file.symlink_to(outside)
    os.mkfifo(file.with_name("pipe.prefix"))
    file.with_name("folder.prefix").mkdir()
    file.with_name("notes.txt").write_text("of somebody")
    writable = Path(shutil.copy(outside, file.with_name("writable.prefix")))
    writable.chmod(0o666)
    with opened(tmp_path) as disk:
        assert load(disk) is None
        assert disk.statistics().damaged == 4
    assert file.with_name("notes.txt").exists()
    assert outside.exists()


def test_ca06_another_users_file_is_not_opened(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(file, 12345, 12345)
    with opened(tmp_path) as disk:
        assert load(disk) is None
        assert disk.statistics().damaged == 1
    os.chown(file.parent, 12345, 12345)
    with pytest.raises(StorageError, match="only you may write to"):
        PrefixDisk(tmp_path, IDENTITY, BUDGET)


def test_ca06_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, file: Path) -> None:
    file.parent.chmod(0o777)
    with pytest.raises(StorageError, match="only you may write to"):
        PrefixDisk(tmp_path, IDENTITY, BUDGET)
    shutil.rmtree(file.parent)
    file.parent.symlink_to(tmp_path)
    with pytest.raises(StorageError, match="link"):
        PrefixDisk(tmp_path, IDENTITY, BUDGET)
    with pytest.raises(StorageError):
        PrefixDisk(Path("/proc/nothing"), IDENTITY, BUDGET)


def small_file() -> bytes:
    keys = PageKeys(b"r" * 32)
    block = keys.whole(keys.root, ids_of(256))
    end = keys.end(block.key, ids_of(44, start=256))
    return encode(
        sha256(IDENTITY), keys.root, [PageContent(block, b"b" * 64, b""), PageContent(end, b"e", b"s")]
    )[0]


@given(
    st.lists(st.tuples(st.integers(0, 1500), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4),
    st.integers(-50, 50),
)
def test_ca06_a_header_that_lies_with_a_right_checksum_is_found_out_or_harmless(
    changes: list[tuple[int, bytes]], grown: int
) -> None:
    """Whatever the header says, places lie within the file, and their digests decide."""
    whole = small_file()
    header_bytes = int.from_bytes(whole[12:16], "little")
    header = bytearray(whole[48 : 48 + header_bytes])
    for position, content in changes:
        header[position % len(header) :][: len(content)] = content
        start = position % len(header)
        header[start : start + len(content)] = content
    header = header[: len(header) + grown] if grown < 0 else header + bytes(grown)
    start = whole[:12] + len(header).to_bytes(4, "little") + sha256(bytes(header))
    lying = start + bytes(header) + whole[48 + header_bytes :]

    def read_at(offset: int, count: int) -> bytes:
        assert count <= len(lying)
        return lying[offset : offset + count]

    try:
        parsed = parse(read_at, len(lying), sha256(IDENTITY))
    except DamagedFileError:
        return
    for place in parsed.places:
        try:
            content = place.read(read_at)
        except DamagedFileError:
            continue
        assert sha256(content.content + content.state) == place.digest


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The system refuses longer files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [0, 1, 100, 3000])
def test_ca07_a_disk_that_is_full_ends_the_saving_and_leaves_nothing_behind(
    tmp_path: Path, limit: int
) -> None:
    memory = Memory(20, 8)
    with opened(tmp_path) as disk:
        cache = PrefixCache(memory, max_states=2, tiers=[disk])
        with files_of_at_most(limit):
            for start in (0, 5000, 9000):
                ids = list(range(start, start + 700))
                prefix = cache.begin(ids)
                memory.extend(prefix.sequence, ids[: prefix.checkpoints[-1]])
                cache.keep(ids, prefix.sequence)
                memory.extend(prefix.sequence, ids)
                memory.release(prefix.sequence)
            cache.make_room(CacheSize(20, 8))
        (statistics,) = cache.statistics().tiers
        assert "cannot be written" in statistics.problem
        assert not disk.save("", ids_of(LENGTH), Source(LENGTH))
        assert cache.begin(ids_of(700).tolist()).length == 0
        assert [each.name for each in tmp_path.glob("*/*")] == ["lock"]
        assert statistics.num_bytes == 0


def test_ca07_a_folder_that_vanishes_ends_the_saving_but_not_the_cache(tmp_path: Path, file: Path) -> None:
    with opened(tmp_path) as disk:
        shutil.rmtree(tmp_path / file.parent.name)
        assert not disk.save("", ids_of(900, start=50), Source(900))
        assert "cannot be written" in disk.statistics().problem
        assert load(disk) is None
        disk.clear(None)


def test_ca08_after_kills_at_any_moment_only_whole_files_are_found(tmp_path: Path) -> None:
    for seed in range(3):
        worker = subprocess.Popen(
            [sys.executable, str(WORKER), str(tmp_path), str(seed)], stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None
        for _ in range(2 + 9 * seed):
            assert worker.stdout.readline()
        worker.kill()
        worker.stdout.close()
        worker.wait()
        (tmp_path / sha256(IDENTITY).hex()[:32] / f".{seed:016x}.tmp").write_bytes(b"half")
        with opened(tmp_path, budget=300_000) as disk:
            assert disk.statistics().damaged == 0
            assert disk.statistics().pages > 0
            assert disk.statistics().num_bytes <= 300_000
            for start in range(0, 40_000, 10_000):
                ids = ids_of(1501, start)
                length = disk.longest("", ids, 1500)
                saved = disk.load("", ids, 1500, 0)
                assert (saved is None) == (length == 0)
                assert is_right(saved, length)
        assert not [*tmp_path.glob("*/.*")]


def test_ca09_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path):
        with pytest.raises(StorageError, match="in use by another process"):
            PrefixDisk(tmp_path, IDENTITY, BUDGET)
        with opened(tmp_path, b"another model"):
            pass
    with opened(tmp_path):
        pass


def test_closing_twice_closes_no_descriptor_of_somebody_else(tmp_path: Path) -> None:
    disk = PrefixDisk(tmp_path, IDENTITY, BUDGET)
    disk.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]  # one of them has the number of the lock
    disk.close()
    for each in others:
        os.fstat(each)
        os.close(each)


def test_pc01_a_file_is_not_found_under_another_key(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        for namespace in ("key of one", "key of another"):
            assert disk.save(namespace, ids_of(LENGTH), Source(LENGTH))
        assert disk.statistics().pages == 4
        assert load(disk) is None
        disk.clear("key of one")
        assert load(disk, namespace="key of one") is None
        assert load(disk, namespace="key of another") is not None
    names_and_bytes = [(path.name.encode(), path.read_bytes()) for path in tmp_path.glob("*/*")]
    assert all(b"key of" not in part for each in names_and_bytes for part in each)


def test_files_of_models_that_are_not_in_use_count_against_the_budget(tmp_path: Path) -> None:
    """As of versions that will not come back: those used longest ago go first."""
    for identity in (b"oldest", b"in use", b"newest"):
        with opened(tmp_path, identity) as disk:
            assert disk.save("", ids_of(LENGTH), Source(LENGTH))
            one = disk.statistics().num_bytes
    with opened(tmp_path, b"in use"), opened(tmp_path, budget=2 * one):
        assert len([*tmp_path.glob("*/*.prefix")]) == 2
    with opened(tmp_path, b"newest") as disk:
        assert load(disk) is not None
    with opened(tmp_path, b"in use") as disk:
        assert load(disk) is not None
    with opened(tmp_path, budget=0):
        assert not [*tmp_path.glob("*/*.prefix")]


def open_descriptors() -> list[str]:
    return sorted(os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd"))


def test_folders_of_others_are_let_go_of_however_they_were_left(tmp_path: Path) -> None:
    """Those that were emptied, and those that another process uses."""
    for identity in (b"emptied", b"in use"):
        with opened(tmp_path, identity) as disk:
            assert disk.save("", ids_of(LENGTH), Source(LENGTH))
    with opened(tmp_path, b"in use"):
        before = open_descriptors()
        with opened(tmp_path, budget=0):
            assert len(open_descriptors()) == len(before) + 1
        assert open_descriptors() == before
    with opened(tmp_path, b"emptied") as disk:
        assert disk.statistics().pages == 0


def test_a_folder_that_cannot_be_read_or_is_in_use_is_let_go_of(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, errors = open_descriptors(), []  # an error that is kept holds the frames that it went through

    def fails(path: Path) -> Iterator[Path]:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", fails)
        with pytest.raises(StorageError, match="cannot be read: Input/output error") as caught:
            PrefixDisk(tmp_path, IDENTITY, BUDGET)
    errors.append(caught)
    assert open_descriptors() == before
    with opened(tmp_path):
        inside = open_descriptors()
        with pytest.raises(StorageError, match="in use by another process") as caught:
            PrefixDisk(tmp_path, IDENTITY, BUDGET)
        errors.append(caught)
        assert open_descriptors() == inside


def test_others_keep_what_fits_to_the_byte(tmp_path: Path) -> None:
    for identity in (b"older", b"newer"):
        with opened(tmp_path, identity) as disk:
            assert disk.save("", ids_of(LENGTH), Source(LENGTH))
            one = disk.statistics().num_bytes
    for budget, left in ((2 * one, 2), (2 * one - 1, 1), (one, 1), (one - 1, 0)):
        with opened(tmp_path, budget=budget):
            assert len([*tmp_path.glob("*/*.prefix")]) == left


def test_a_folder_that_was_used_last_goes_last_though_nothing_was_saved_in_it(tmp_path: Path) -> None:
    for identity in (b"first", b"second"):
        with opened(tmp_path, identity) as disk:
            assert disk.save("", ids_of(LENGTH), Source(LENGTH))
            one = disk.statistics().num_bytes
        lock = tmp_path / sha256(identity).hex()[:32] / "lock"
        os.utime(lock, (1e9, 1e9 + (identity == b"second")))
    with opened(tmp_path, b"first"):
        pass
    with opened(tmp_path, budget=one):
        pass
    with opened(tmp_path, b"first") as disk:
        assert load(disk) is not None


def test_damaged_files_are_removed_when_the_folder_is_opened(tmp_path: Path, file: Path) -> None:
    file.write_bytes(b"half")
    foreign = file.with_name("foreign.prefix")
    foreign.write_bytes(b"half")
    for damaged in (2, 1):
        with opened(tmp_path) as disk:
            assert disk.statistics().damaged == damaged
    assert foreign.exists()


def test_files_can_be_read_by_their_owner_only(tmp_path: Path, file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_smaller_budget_removes_what_was_used_longest_ago(tmp_path: Path) -> None:
    """Times of use survive a restart, however close they are."""
    starts = range(0, 50_000, 5000)
    with opened(tmp_path) as disk:
        for start in starts:
            assert disk.save("", ids_of(LENGTH, start), Source(LENGTH))
        for start in starts[4::-1]:
            assert disk.load("", ids_of(LENGTH + 1, start), LENGTH, 0) is not None
        one = disk.statistics().num_bytes // len(starts)
    with opened(tmp_path, budget=5 * one) as disk:
        lengths = [disk.longest("", ids_of(400, start), 400) for start in starts]
        assert lengths == [LENGTH] * 5 + [0] * 5
        assert len([*tmp_path.glob("*/*.prefix")]) == 5


def test_long_prefixes_are_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coldstream.kvcache.prefix.disk_tier.PART_BYTES", 5000)
    with opened(tmp_path) as disk:
        assert disk.save("", ids_of(2000), Source(2000))
    assert len([*tmp_path.glob("*/*.prefix")]) == 4
    with opened(tmp_path) as disk:
        assert is_right(disk.load("", ids_of(2001), 2000, 0), 2000)
        saved = disk.load("", ids_of(2001), 2000, 6)
        assert saved is not None
        assert [block[0] for block in saved.blocks] == [6, 7]


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    """After a kill it goes on from what was saved in idle moments."""
    ids = ids_of(1500).tolist()
    for is_clean in (True, False):
        folder = tmp_path / str(is_clean)
        memory = Memory(20, 8)
        disk = PrefixDisk(folder, IDENTITY, BUDGET)
        cache = PrefixCache(memory, max_states=4, tiers=[disk])
        prefix = cache.begin(ids)
        memory.extend(prefix.sequence, ids)
        cache.keep(ids, prefix.sequence)
        memory.release(prefix.sequence)
        assert cache.save_one()
        assert not cache.save_one()
        if is_clean:
            cache.close()
        else:
            disk.close()
        memory = Memory(20, 8)
        with opened(folder) as disk:
            prefix = PrefixCache(memory, max_states=4, tiers=[disk]).begin([*ids, 1])
            assert prefix.length == 1500
            memory.check(prefix.sequence, ids)


def test_a_saved_prefix_equals_what_numpy_reads_of_its_file(file: Path) -> None:
    """The bytes in the file are the pages, one behind the other."""
    content = np.frombuffer(file.read_bytes(), np.uint8)
    assert content[-(300 * 10 + 5) :].tolist() == [0] * 2560 + [1] * 440 + [49] * 5
