"""Rows of a step whose tokens the device has chosen, and the host does not know yet."""

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from coldstream.errors import InvalidRequestError
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.staged import StagedRing
from coldstream.kernels.cuda.structs import declared_in

MAX_ENDS = 2048  # tokens of all rows of a step after which a row is left out
THREADS = 32
PROGRAM = CudaProgram(Path(__file__).with_name("admit.cu"), ("admit_rows",))


@declared_in("sample/admit.cu")
class _StepRows(ctypes.Structure): ...


@declared_in("sample/admit.cu")
class _Admission(ctypes.Structure): ...


ADMISSION_WORDS = ctypes.sizeof(_Admission) // 4  # of 32 bits


@dataclass(frozen=True)
class Admission:
    """Row `row` of a step has the token that result `chosen` names, unless that is one of `end_ids`."""

    row: int
    chosen: int
    end_ids: Collection[int]


def admission_values(num_rows: int) -> int:
    """int32 values of device memory for up to `num_rows` admissions."""
    return num_rows * ADMISSION_WORDS + MAX_ENDS


def admit_rows(
    admissions: Sequence[Admission], staged: StagedRing, chosen: DeviceArray, rows: DeviceArray
) -> None:
    """Writes token ids into a step's inputs, on the device; one copy and one launch.

    chosen: int32 [k, 2], results of the sampler: the token, and 0 unless there was none to choose. rows:
    int32 [columns, num_rows], the inputs, token ids first. A row whose token is one of its `end_ids`, or was
    not chosen, becomes one of no sequence: token 0, and -1 in the other columns. staged: `admission_values`
    values. Raises InvalidRequestError for more than MAX_ENDS end tokens, DeviceError.
    """
    num_ends = sum(len(each.end_ids) for each in admissions)
    if num_ends > MAX_ENDS:
        raise InvalidRequestError(f"{num_ends} end tokens of a step's rows; there may be {MAX_ENDS}")
    ends = ADMISSION_WORDS * len(admissions)
    values = staged.next_on_host()
    first = 0
    for index, each in enumerate(admissions):
        count = len(each.end_ids)
        at = ADMISSION_WORDS * index
        values[at : at + ADMISSION_WORDS] = each.row, each.chosen, first, count
        values[ends + first : ends + first + count] = list(each.end_ids)
        first += count
    staged.copy(ends + first)
    where = _StepRows(values=rows.data_ptr(), stride=rows.stride(0), columns=len(rows))
    args = (where, chosen, staged.values, staged.values[ends:])
    PROGRAM.kernel("admit_rows").launch((len(admissions), 1, 1), THREADS, args)
