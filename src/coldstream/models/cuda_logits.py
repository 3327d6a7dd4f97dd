"""Logits that stay on the GPU, where next tokens can be chosen from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

from coldstream.kernels.cuda.device import device_errors
from coldstream.kernels.sample.cuda import (
    ARGMAX_BYTES,
    ROW_BYTES,
    SamplerRows,
    argmax_cuda,
    sample_cuda,
)

ALL_TOKENS = 2**31 - 1  # a penalty window without end
SIGN_BIT = 2**63


# Each setting of a row takes eight bytes of one buffer, so that one copy brings them all.
SETTING_DTYPES = {
    "temperature": torch.float64,
    "top_k": torch.int32,
    "top_p": torch.float64,
    "min_p": torch.float64,
    "repetition_penalty": torch.float32,
    "presence_penalty": torch.float32,
    "frequency_penalty": torch.float32,
    "penalty_window": torch.int32,
    "seed": torch.int64,
    "position": torch.int32,
    "slot": torch.int32,
}
SETTING_BYTES = 8


class Sampler:
    """What choosing one token at a time needs on the device, from `zeros` of the model's operations."""

    def __init__(self, zeros: Callable[[tuple[int, ...], str], torch.Tensor], context_length: int) -> None:
        self._settings = zeros((len(SETTING_DTYPES) * SETTING_BYTES,), "uint8")
        self._history = zeros((1, context_length), "int32")
        self._rows = SamplerRows(**_views(self._settings), history=self._history)
        self._results = zeros((2,), "int32")
        self._workspace = zeros((1, ROW_BYTES), "uint8")
        self._argmax_workspace = zeros((1, ARGMAX_BYTES), "uint8")
        self._staged = torch.empty(self._settings.shape, dtype=torch.uint8)
        self._host_results = torch.empty(2, dtype=torch.int32)
        if not self._settings.is_meta:
            self._staged, self._host_results = self._staged.pin_memory(), self._host_results.pin_memory()
        self._staged_rows = _views(self._staged)

    def choose(
        self, logits: torch.Tensor, context: Sequence[int], settings: dict[str, float], has_penalties: bool
    ) -> int | None:
        """The token that follows `context`, for logits [1, vocab]; None if there is none to choose."""
        token, faults = self._results[:1], self._results[1:]
        if settings["temperature"] == 0 and not has_penalties:
            argmax_cuda(logits, token, faults, self._argmax_workspace)
        else:
            for name, view in self._staged_rows.items():
                view[0] = settings[name]
            self._settings.copy_(self._staged, non_blocking=True)
            if has_penalties:
                self._bring(context[-int(settings["penalty_window"]) :], len(context))
                logits = logits.clone()  # penalties change them, and somebody may still want to see them
            sample_cuda(logits, self._rows, token, faults, self._workspace)
        self._host_results.copy_(self._results, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        chosen, fault = self._host_results.tolist()
        return None if fault else int(chosen)

    def _bring(self, window: Sequence[int], end: int) -> None:
        """Put the last tokens of a context of `end` where the sampler looks for them."""
        tokens = torch.tensor(window, dtype=torch.int32)
        self._history[0, end - len(window) : end].copy_(tokens)


def _views(settings: torch.Tensor) -> dict[str, torch.Tensor]:
    """One element each of a buffer of settings."""
    parts = torch.split(settings, SETTING_BYTES)
    return {
        name: part[: dtype.itemsize].view(dtype)
        for (name, dtype), part in zip(SETTING_DTYPES.items(), parts, strict=True)
    }


@dataclass(frozen=True)
class OnDevice:
    """What logits of one step have in common."""

    sampler: Sampler
    is_current: Callable[[], bool]  # until the runner's next step
    download: Callable[[torch.Tensor], np.ndarray[Any, Any]]
    ended: Callable[[], None]  # called when the device has done what came before

    def check(self) -> None:
        """Raises RuntimeError if the memory may have other contents."""
        if not self.is_current():
            raise RuntimeError("these logits are gone: the model has computed another step since")


@dataclass(frozen=True)
class StepLogits:
    """float32 logits [n, vocab] after rows of a step. Valid until the runner's next step."""

    values: torch.Tensor
    step: OnDevice

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, rows: int) -> "CudaLogits": ...

    @overload
    def __getitem__(self, rows: slice) -> "StepLogits": ...

    def __getitem__(self, rows: int | slice) -> "CudaLogits | StepLogits":
        if isinstance(rows, slice):
            return StepLogits(self.values[rows], self.step)
        row = range(len(self))[rows]
        return CudaLogits(self.values[row : row + 1], self.step)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        self.step.check()
        with device_errors():
            return np.array(self.step.download(self.values), dtype=dtype)


@dataclass(frozen=True)
class CudaLogits:
    """float32 logits [1, vocab] after one row of a step; implements decoding's `DeviceLogits`."""

    values: torch.Tensor
    step: OnDevice

    def __len__(self) -> int:
        return self.values.shape[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        self.step.check()
        with device_errors():
            return np.array(self.step.download(self.values)[0], dtype=dtype)

    def choose(
        self,
        context: Sequence[int],
        *,
        repeat_last_n: int | None,
        has_penalties: bool,
        seed: int,
        **settings: float,
    ) -> int | None:
        """See decoding's `DeviceLogits`."""
        self.step.check()
        with device_errors():
            token = self.step.sampler.choose(
                self.values,
                context,
                {
                    **settings,
                    "penalty_window": ALL_TOKENS if repeat_last_n is None else repeat_last_n,
                    "seed": (seed ^ SIGN_BIT) - SIGN_BIT,
                    "position": len(context) - 1,
                    "slot": 0,
                },
                has_penalties,
            )
            self.step.ended()
        return token
