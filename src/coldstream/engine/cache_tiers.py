"""Where prefixes of prompts go that have no room in the model's own memory: settings, and what they open."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import coldstream
from coldstream.engine.opened_model import OpenedModel
from coldstream.errors import ConfigError, shown
from coldstream.gguf.reader import GGUFFile
from coldstream.kvcache import PrefixDisk, PrefixRam, PrefixTier

_SAMPLE_BYTES = 4096  # bytes of each tensor that distinguish models with equal headers


@dataclass(frozen=True)
class CacheTiers:
    """Checked on creation: ConfigError names the setting and its range."""

    ram_bytes: int = 0  # RAM for prefixes, which the model's plan counts; 0: none, or the plan's
    disk_folder: Path | None = None  # None: prefixes do not survive a restart
    disk_bytes: int = 16 << 30  # limit for files of this model in that folder

    def __post_init__(self) -> None:
        for name, value in (("ram_bytes", self.ram_bytes), ("disk_bytes", self.disk_bytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} must be a number of bytes, 0 or more, not {shown(value)}")


def open_tiers(settings: CacheTiers, opened: OpenedModel) -> tuple[PrefixTier, ...]:
    """The tiers for a `PrefixCache` of the opened model, the fastest first.

    That in RAM is as large as the plan says. Raises StorageError if the folder cannot be used; nothing stays
    open then.
    """
    ram_bytes = opened.plan.prompt_cache_bytes
    assert settings.ram_bytes in (0, ram_bytes), "a model is opened with the RAM of its tier"
    tiers: list[PrefixTier] = []
    if ram_bytes:
        tiers.append(PrefixRam(ram_bytes))
    if settings.disk_folder is not None:
        tiers.append(PrefixDisk(settings.disk_folder, cache_identity(opened), settings.disk_bytes))
    return tuple(tiers)


def cache_identity(opened: OpenedModel) -> bytes:
    """What the bytes of a kept prefix depend on beside its tokens; other values must never be mixed.

    The device is none of it, nor are budgets, drafts and batches: they change no bit. Reads some bytes of
    each tensor. Raises ModelChangedError.
    """
    plan = opened.plan
    parts = (
        coldstream.__version__,
        plan.placement.fixed.kv_type,
        str(plan.attention_window),
        # Where layers with windows have blocks of their own, a prefix ends with them.
        *(["windows"] if plan.placement.fixed.num_window_blocks else []),
        _weights(opened.runner.file),
    )
    return "\n".join(parts).encode()


def _weights(file: GGUFFile) -> str:
    """A hash of the model's headers, the times its files were written, and samples of all tensors.

    A file with a block that drafts, joined to the model's, changes no bit.
    """
    file.check_unchanged()
    digest = hashlib.sha256(file.fingerprint.encode())
    for shard in range(file.num_parts):
        digest.update(os.fstat(file.descriptor(shard)).st_mtime_ns.to_bytes(16, "little", signed=True))
    for info in (each for each in file.tensors.values() if each.shard < file.num_parts):
        offset = info.offset + max(0, info.num_bytes - _SAMPLE_BYTES) // 2
        digest.update(os.pread(file.descriptor(info.shard), min(info.num_bytes, _SAMPLE_BYTES), offset))
    file.check_unchanged()
    return digest.hexdigest()
