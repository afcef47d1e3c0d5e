"""What a process uses, without what its allocators keep: a thread of that process writes it into a file."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

import msgspec
import pyarrow as pa

from spark_broker.broker import process
from spark_broker.broker.custody import LeaveRequest
from spark_broker.broker.spec import BrokerSpec

DIRECTORY = "SPARK_BROKER_SOAK_CENSUS"
"""The environment variable that names where the files are."""

EVERY_S = 1.0


class Census(msgspec.Struct, frozen=True):
    """`used_mb`: what glibc and Arrow have given out, without Python's small objects. `objects`: how many those are."""

    used_mb: float
    objects: int

    @staticmethod
    def of(pid: int) -> Census | None:
        """The newest census of a process on this machine; None when it writes none."""
        try:
            return msgspec.json.decode(_file(pid).read_bytes(), type=Census)
        except (FileNotFoundError, KeyError):
            return None


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def begin() -> None:
    """Write a census every second for as long as the process lives."""
    threading.Thread(target=_write, name="census", daemon=True).start()


def run_broker(spec: BrokerSpec, leave: LeaveRequest) -> str:
    """A broker's process that writes a census."""
    begin()
    return process.run_broker(spec, leave)


def _write() -> None:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    path, pause = _file(os.getpid()), threading.Event()
    temporary = path.with_suffix(".new")
    while not pause.wait(EVERY_S):
        malloc = libc.mallinfo2()
        used = malloc.uordblks + malloc.hblkhd + pa.total_allocated_bytes()
        temporary.write_bytes(msgspec.json.encode(Census(round(used / 1e6, 3), sys.getallocatedblocks())))
        temporary.rename(path)


def _file(pid: int) -> Path:
    return Path(os.environ[DIRECTORY]) / f"{pid}.json"
