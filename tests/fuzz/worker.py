"""The process that tries inputs: it may crash, hang or run out of memory; who started it learns which input did it.

`python -m tests.fuzz.worker TARGET FIRST_SEED COUNT SECONDS DIRECTORY`. Each line of output is a `Report`. The input
that is being tried is in `DIRECTORY/current`: its seed and length, 8 bytes each, then its bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import resource
import struct
import sys
import time
import traceback
from functools import cache
from pathlib import Path

import msgspec
import pyarrow as pa

from tests.fuzz.planted import PLANTED
from tests.fuzz.targets import MAX_INPUT_BYTES, TARGETS, Target, input_of

CASE_TIMEOUT_S = 10
"""An input that takes longer is a hang. Ordinary ones take a millisecond."""

ADDRESS_SPACE_BYTES = 512 << 20
"""What the process may ask for beyond what it has once it is warm: a claimed length must not be allocated on trust."""

PEAK_BYTES = 64 << 20
"""How far an input may raise the highest memory in use: inputs are at most 2 MiB, batches inflate to at most 4 MiB."""

WARM_UP = 200
REPORT_S = 0.2
CURRENT = "current"
_HEAD = struct.Struct("<QQ")
CURRENT_BYTES = _HEAD.size + MAX_INPUT_BYTES


class Report(msgspec.Struct):
    """Cases tried and accepted up to `next_seed`; with `finding`, what the case `next_seed - 1` did."""

    next_seed: int
    accepted: int
    finding: str = ""
    done: bool = False


class Current:
    """The input that is being tried, where it outlives this process."""

    def __init__(self, directory: Path) -> None:
        with (directory / CURRENT).open("w+b") as file:
            file.truncate(CURRENT_BYTES)
            self._map = mmap.mmap(file.fileno(), CURRENT_BYTES)

    def set(self, seed: int, data: bytes) -> None:
        self._map[: _HEAD.size] = _HEAD.pack(seed, len(data))
        self._map[_HEAD.size : _HEAD.size + len(data)] = data


def read_current(directory: Path) -> tuple[int, bytes]:
    """Seed and bytes of the input that a worker tried last; seed 2**64 - 1: it had not begun."""
    raw = (directory / CURRENT).read_bytes()
    seed, length = _HEAD.unpack_from(raw)
    return seed, raw[_HEAD.size : _HEAD.size + length]


def main(name: str, first_seed: int, count: int, seconds: float, directory: Path) -> None:
    """Try seeds from `first_seed` on, until `count` were tried or the time is up."""
    current = Current(directory)
    current.set(2**64 - 1, b"")
    target = {**TARGETS, **PLANTED}[name]
    _limit_process(target, name)
    settled = _used_bytes()
    end, next_report, accepted = time.monotonic() + seconds, time.monotonic(), 0
    seed = first_seed
    while seed < first_seed + count and time.monotonic() < end:
        current.set(seed, b"")  # making the input may already end the process
        data = input_of(name, seed) if name in TARGETS else seed.to_bytes(8, "little")
        current.set(seed, data)
        peak = _peak_bytes()  # making an input may take more than judging it
        faulthandler.dump_traceback_later(CASE_TIMEOUT_S, exit=True)
        finding = ""
        try:
            accepted += target.judge(data)
        except BaseException:  # noqa: BLE001 - whatever it is, it is the finding
            finding = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        seed += 1
        if (grown := _peak_bytes() - peak) > PEAK_BYTES:
            finding = finding or f"the memory in use rose by {grown >> 20} MiB"
        if finding or time.monotonic() >= next_report:
            _say(Report(seed, accepted, finding))
            next_report = time.monotonic() + REPORT_S
    kept = _used_bytes() - settled
    leak = f"{kept >> 20} MiB are still in use after {seed - first_seed} inputs" if kept > PEAK_BYTES else ""
    _say(Report(seed, accepted, leak, done=True))


def _limit_process(target: Target, name: str) -> None:
    """Warm up, then bound the address space: Arrow's and Python's pools, and the libraries, are in it by then."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    if name in TARGETS:
        for seed in range(WARM_UP):
            with contextlib.suppress(Exception):  # found again, and reported, when its seed has its turn
                target.judge(input_of(name, seed))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE_BYTES, resource.RLIM_INFINITY))


@cache
def _status() -> int:
    return os.open("/proc/self/status", os.O_RDONLY)


def _peak_bytes() -> int:
    """The peak of this program's memory: `ru_maxrss` would begin with the peak of the process that started it."""
    status = os.pread(_status(), 4096, 0)
    at = status.index(b"VmHWM:") + 6
    return int(status[at : status.index(b"kB", at)]) * 1024


def _used_bytes() -> int:
    """Resident memory, after freed memory was given back."""
    ctypes.CDLL(None).malloc_trim(0)
    pa.default_memory_pool().release_unused()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _say(report: Report) -> None:
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
