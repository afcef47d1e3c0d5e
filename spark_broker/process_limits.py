"""Tells an error at a limit of the process from a bug: no memory, or no more threads. It names the limit.

A process without memory has no bug, and its operator can do something. What the message names was read when the error
came: the limits of the process (`ulimit`), of its control group (a container's), and of the machine.
"""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

from spark_broker.errors import NoMemoryError, NoThreadError, ProcessLimitError

MIB = 1 << 20

NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
"""The system's errors where this process, or the machine, has no descriptor left."""

SYSTEM_LIMITS = NO_DESCRIPTOR | {errno.ENOMEM, errno.EAGAIN}
"""The system's errors at a limit: of descriptors, of memory, of threads and processes."""

_NO_THREAD = re.compile("can't (start|create) new thread")
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (  # of memory: name, limit, the line of /proc/self/status that says how much is used
    ("RLIMIT_AS (ulimit -v)", resource.RLIMIT_AS, "VmSize"),
    ("RLIMIT_DATA (ulimit -d)", resource.RLIMIT_DATA, "VmData"),
)


def limit_reached(error: BaseException) -> ProcessLimitError | None:
    """The typed error, if this one came because a limit of the process was reached; otherwise None.

    pyarrow.ArrowMemoryError is a MemoryError. An error counts as well if such an error caused it.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ProcessLimitError):
            return cause
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return NoMemoryError(_told(cause, memory_limits))
        if isinstance(cause, RuntimeError) and _NO_THREAD.search(str(cause)):
            return NoThreadError(_told(cause, thread_limits))
        cause = cause.__cause__
    return None


def memory_limits() -> Iterator[str]:
    """What bounds the memory of this process, and how much of it is used."""
    for name, limit, line in _LIMITS:
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY:
            used = _number(Path("/proc/self/status"), line, 1024)
            yield f"{name} allows {allowed // MIB:,} MiB, of which {_mib(used)} are used"
    allowed_here, used = _of_cgroup("memory", "memory.max", "memory.current")
    if allowed_here is not None:
        yield f"its control group (memory.max) allows {allowed_here // MIB:,} MiB, of which {_mib(used)} are used"
    free = _number(Path("/proc/meminfo"), "MemAvailable", 1024)
    if free is not None:
        yield f"the machine has {_mib(free)} left"


def thread_limits() -> Iterator[str]:
    """What bounds the threads of this process. Each thread needs memory, too: those limits follow."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    running = _number(Path("/proc/self/status"), "Threads")
    yield f"this process has {running} threads"
    if allowed != resource.RLIM_INFINITY:
        yield f"RLIMIT_NPROC (ulimit -u) allows its user {allowed:,} processes and threads"
    allowed_here, used = _of_cgroup("pids", "pids.max", "pids.current")
    if allowed_here is not None:
        yield f"its control group (pids.max) allows {allowed_here:,}, of which {used} are used"
    of_machine = _whole(Path("/proc/sys/kernel/threads-max"))
    if of_machine is not None:
        yield f"the machine (kernel.threads-max) allows {of_machine:,}"
    yield from memory_limits()


def _told(error: BaseException, limits: Callable[[], Iterator[str]]) -> str:
    try:
        return f"{type(error).__name__}{f': {error}' if str(error) else ''}; " + "; ".join(limits())
    except MemoryError:  # There is none to find out more. Whoever asks is about to end something.
        return type(error).__name__


def _mib(size: int | None) -> str:
    return "an unknown number of MiB" if size is None else f"{size // MIB:,} MiB"


def _of_cgroup(controller: str, limit: str, used: str) -> tuple[int | None, int | None]:
    """Limit and use of this process's control group, version 2, or of version 1 as containers see theirs."""
    group = next((line[3:] for line in _lines(Path("/proc/self/cgroup")) if line.startswith("0::")), "/")
    for place in (_CGROUP / group.lstrip("/"), _CGROUP, _CGROUP / controller):
        for limit_name, used_name in ((limit, used), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            allowed = _whole(place / limit_name) if limit_name.startswith(controller) else None
            if allowed is not None and allowed < 1 << 60:  # Version 1 writes a very large number for "no limit".
                return allowed, _whole(place / used_name)
    return None, None


def _number(path: Path, name: str, unit: int = 1) -> int | None:
    """The number after `name:` in a file of /proc."""
    fields = next((line.split() for line in _lines(path) if line.startswith(f"{name}:")), [])
    return int(fields[1]) * unit if len(fields) > 1 and fields[1].isdigit() else None


def _whole(path: Path) -> int | None:
    """The number that a file consists of; None where there is no such file, or no limit ("max")."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []  # This kernel or container does not show it.
