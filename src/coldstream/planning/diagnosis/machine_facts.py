"""What was seen of a machine and an installation, as plain data: `dataclasses.asdict` gives JSON."""

from dataclasses import dataclass
from typing import Literal

from coldstream.kernels.cuda.driver import Driver
from coldstream.placement.hardware_file import RatesState
from coldstream.placement.limits import Limits

FolderName = Literal["rates", "kernels", "counts", "drafters", "models"]


@dataclass(frozen=True)
class Program:
    """This package and what runs it."""

    version: str
    python: str
    system: str  # name, release and architecture
    installed: tuple[str, ...] = ()  # versions that this Python finds, the one that it imports first
    commands: tuple[str, ...] = ()  # files called coldstream on the PATH, the one that runs first


@dataclass(frozen=True)
class Cpu:
    """The CPU as this process may use it."""

    name: str
    tiers: tuple[str, ...]  # of kernels that it can run; the last one runs
    num_cores: int  # at most the CPU quota
    num_logical_cpus: int


@dataclass(frozen=True)
class Ram:
    """Memory of the machine or of its control groups, whichever is less."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Card:
    """An NVIDIA card on the PCI bus. Lanes are None where the system does not say."""

    address: str
    lanes: int | None
    max_lanes: int | None


@dataclass(frozen=True)
class Gpu:
    """Cards, their driver, and the packages that reach them."""

    cards: tuple[Card, ...]
    driver: Driver
    driver_version: str | None  # as nvidia-smi shows it
    missing_packages: tuple[str, ...]
    nvrtc: tuple[int, int] | None  # the compiler's version
    is_restricted: bool  # whether CUDA_VISIBLE_DEVICES is set


@dataclass(frozen=True)
class Library:
    """A package that this one asks for."""

    name: str
    extra: str | None  # None: every installation has it
    version: str | None  # None: it is not installed
    least: str | None  # the oldest version that is tested


@dataclass(frozen=True)
class Folder:
    """A folder that outlasts a run; path: None for a user without a home directory."""

    name: FolderName
    path: str | None
    exists: bool
    is_writable: bool  # or would be, if it has to be made
    free_bytes: int | None
    problem: str | None = None  # why what is in it is not used
    damaged: tuple[str, ...] = ()  # names of files that fail their check


@dataclass(frozen=True)
class MeasuredRates:
    """Rates of the CPU or the GPU; problems: what disturbed their measurement."""

    name: str
    measured_at: str
    age_days: int
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rates:
    """The kept rates of this machine. measured: none unless they are current."""

    state: RatesState
    measured: tuple[MeasuredRates, ...] = ()

    @property
    def age_days(self) -> int | None:
        """Of the oldest."""
        return max((each.age_days for each in self.measured), default=None)


@dataclass(frozen=True)
class RefusedLock:
    """What the system refused to page-lock for a GPU when a model was opened last."""

    refused_at: str
    age_days: int
    wanted_bytes: int
    locked_bytes: int


@dataclass(frozen=True)
class MachineFacts:
    """All that was seen. No text in it has a home directory's path or a user's name."""

    program: Program
    cpu: Cpu
    ram: Ram
    gpu: Gpu
    libraries: tuple[Library, ...]
    limits: Limits
    folders: tuple[Folder, ...]
    rates: Rates
    refused_lock: RefusedLock | None = None
