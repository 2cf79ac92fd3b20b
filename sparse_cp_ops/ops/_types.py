"""Type checks of the wrappers' arguments."""

import threading
from typing import Any

import torch


def require_tensors(op: str, **arguments: Any) -> None:
    """Raise TypeError unless every argument is a tensor."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name}: expected a torch.Tensor, got {type(value).__name__}")


def require_optional_tensors(op: str, **arguments: Any) -> None:
    """Raise TypeError unless every argument is a tensor or None."""
    require_tensors(op, **{name: value for name, value in arguments.items() if value is not None})


def require_ints(op: str, **arguments: Any) -> None:
    """Raise TypeError unless every argument is an int (a bool is none), ValueError unless it has at most 64 bits."""
    for name, value in arguments.items():
        if type(value) is int and -(2**63) <= value < 2**63:
            continue  # nearly always
        if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
            raise TypeError(f"{op}: {name}: expected int, got {type(value).__name__}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{op}: {name}: expected a 64-bit int, got {value}")


def require_optional_ints(op: str, **arguments: Any) -> None:
    """As :func:`require_ints`, or None."""
    for name, value in arguments.items():
        if value is not None:
            require_ints(op, **{name: value})


def require_floats(op: str, **arguments: Any) -> None:
    """Raise TypeError unless every argument is a float or an int (a bool is none)."""
    for name, value in arguments.items():
        if not isinstance(value, (float, int, torch.SymFloat)) or isinstance(value, bool):
            raise TypeError(f"{op}: {name}: expected float, got {type(value).__name__}")


def require_bools(op: str, **arguments: Any) -> None:
    """Raise TypeError unless every argument is a bool."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise TypeError(f"{op}: {name}: expected bool, got {type(value).__name__}")


def require_strs(op: str, **arguments: Any) -> None:
    """Raise TypeError unless every argument is a str, ValueError where C++ could not take it or show it."""
    for name, value in arguments.items():
        if not isinstance(value, str):
            raise TypeError(f"{op}: {name}: expected str, got {type(value).__name__}")
        if not value.isprintable():
            raise ValueError(f"{op}: {name}: expected printable text, got {value!r}")


def require_seconds(op: str, **times: float) -> None:
    """Refuse times that nobody can wait for."""
    require_floats(op, **times)
    for name, seconds in times.items():
        if not 0 <= seconds <= threading.TIMEOUT_MAX:
            raise ValueError(f"{op}: {name}: expected 0 to {threading.TIMEOUT_MAX:.0f} s, got {seconds}")
