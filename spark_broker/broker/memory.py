"""Memory that is free in the process, given back to the machine that the broker shares with an executor.

The C library and Arrow keep what was freed, in pieces, for each thread that asked: beside clients that come and go a
broker that used 30 MB held 100, and a few more every hour.
"""

from __future__ import annotations

import ctypes

import pyarrow as pa

GIVE_BACK_S = 10.0

_libc = ctypes.CDLL(None)


def give_back() -> None:
    """Takes milliseconds, without the interpreter's lock. Other C libraries than glibc do it by themselves."""
    pa.default_memory_pool().release_unused()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
