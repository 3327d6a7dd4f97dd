"""What a run took, kept beside what was expected of it when it was planned."""

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from coldstream.errors import StorageError
from coldstream.placement.forecast import forecast
from coldstream.placement.hardware_file import DATE_FORMAT
from coldstream.placement.lock_file import lock_path, note_lock
from coldstream.placement.run_file import LastRun, Observed, keep_run, runs_path
from coldstream.planning.planned import Planned

LEAST_STEPS: Final = 64  # of a run that says anything


def keep_lock(planned: Planned, locked_bytes: tuple[int, int] | None, path: Path | None = None) -> None:
    """Keeps what the machine refused to page-lock, or forgets it once more is locked.

    locked_bytes: see `ModelRunner.locked_bytes`. path: of the file; None: the default one.
    """
    if locked_bytes is not None:
        with suppress(StorageError):  # the next model that is opened tries it again
            note_lock(planned.hardware, *locked_bytes, path or lock_path())


def keep_observed(
    planned: Planned, observed: Observed | None, uses: tuple[int, int] | None, path: Path | None = None
) -> None:
    """Keeps a run that has ended, if it was long enough and its plan was made without a trace of routing,
    whose forecast takes seconds.

    uses: hits and misses of experts. path: of the file of runs; None: the default one.
    """
    if observed is None or observed.steps < LEAST_STEPS or planned.trace is not None:
        return
    expected = forecast(planned.plan, planned.known, pool=planned.run.pool)
    hits, misses = uses or (0, 0)
    run = LastRun(
        ended_at=datetime.now(UTC).strftime(DATE_FORMAT),
        vram_bytes=planned.plan.budget_bytes,
        steps=observed.steps,
        step_s=observed.seconds / observed.steps,
        expected_s=1 / expected.decode,
        hit_rate=hits / max(1, hits + misses),
        expected_hit_rate=expected.hit_rate,
        cpu_factor=observed.cpu_factor,
        bus_factor=observed.bus_factor,
    )
    if LastRun.parsed(vars(run)) is None:
        return  # clocks that went backwards
    with suppress(StorageError):  # it was only for people to read
        keep_run(planned.hardware, planned.plan.model.fingerprint, run, path or runs_path())
