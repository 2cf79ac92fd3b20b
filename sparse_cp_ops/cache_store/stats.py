"""Counters of a store."""

from dataclasses import dataclass


@dataclass
class StoreStats:
    """What a store did, in pages."""

    stored: int = 0  # acknowledged by the backend, or visible in memory if there is none
    refused: int = 0  # no room in host memory when they were to be copied
    failed: int = 0  # copied, but not taken by the backend
    memory_hits: int = 0
    backend_hits: int = 0
    damaged: int = 0
    backend_errors: int = 0  # calls that failed or came too late
