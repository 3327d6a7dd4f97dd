"""Checks of settings that callers give: each raises InvalidRequestError with the name and the range."""

from coldstream.errors import InvalidRequestError, shown

MAX_COUNT = 2**31 - 1


def check_real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be a number from {low:g} to {high:g}, not {shown(value)}")


def check_integer(name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        none = ", or None" if optional else ""
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}{none}, not {shown(value)}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be True or False, not {shown(value)}")
