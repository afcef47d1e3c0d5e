"""A machine in memory: its disk, its processes and its crashes, behind `storage.filesystem.FileSystem`.

A `SimFileSystem` is what one *process* sees of a simulated machine. It is single-threaded, deterministic and fast.

The model is POSIX's, where it promises least:

- A write or a cut of a file is visible to every process at once. It is durable after `fsync` of that file, and of
  nothing else. A name (made, renamed, removed) is durable after `sync_directory` of its directory, and of nothing else;
  a rename happens whole or not at all.
- `crash_process()`: the process's handles and locks are gone; everything that was written stays.
- `crash_machine(rng)`: every process is gone. Each file is its durable content with an arbitrary part of its pending
  changes: each write whole, lost, a prefix of it, or some of its sectors (gaps are zeros); each directory keeps a
  prefix (as a journal would) or any subset of its pending names. The boot id changes. The loss is drawn separately for
  each file and directory, so the index may survive without its batches, and the other way round.
- Both return the file system of the process that comes next. The old one is dead: code that still holds it (a zombie's
  objects, a `finally`) gets `ProcessKilled`, and changes nothing. `another_process()` adds a process beside this one.

Faults:

- `fail_next(kind, errno)`, and `on_operation`, a hook that sees every `Operation` before it happens and may return a
  `Fault`: an error; a write that stops short (`kept_bytes`; the caller is asked again for the rest); the death of the
  process at this point (`kills`), which raises `ProcessKilled` (not an Exception: no code may catch it and go on).
- A failed fsync drops the file's pending changes, as Linux does: they stay visible, a later fsync succeeds, and a crash
  of the machine loses them nevertheless.
- `capacity_bytes`: a write fills the disk to the last byte (a short write) and then raises ENOSPC. Only content counts.
- `flip_bit(path, byte, bit)`: damage at rest.

`journal`, when it is a list, gets every operation that may change something. `copy()` is the same machine once more, to
be crashed in another way. Faults, journal, capacity and processes belong to the machine: the file systems of all its
processes share them. Paths are absolute.
"""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spark_broker.storage.filesystem import ProcessIdentity
from spark_broker.testing.simulation.disk import (
    ChosenSurvival,
    Cut,
    Directory,
    File,
    Handle,
    Node,
    RandomSurvival,
    Rename,
    Survival,
    Write,
    copied,
    pending_changes,
    settle,
)
from spark_broker.testing.simulation.disk_machine import DiskMachine
from spark_broker.testing.simulation.operations import CHANGING, Fault, Operation, ProcessKilled, place_of, system_error

_WRITING = os.O_WRONLY | os.O_RDWR

__all__ = ["CHANGING", "Fault", "Operation", "ProcessKilled", "SimFileSystem"]


class SimFileSystem:
    """The simulated machine, as one of its processes sees it. See the module's documentation for the model."""

    def __init__(self, name: str = "machine", *, machine: DiskMachine | None = None) -> None:
        self._machine = machine or DiskMachine(name)
        if machine is None:
            self._machine.index_directories()
        self._machine.last_pid += 1
        self._pid = self._machine.last_pid
        self._machine.processes[self._pid] = self
        self._alive = True

    @property
    def alive(self) -> bool:
        """Whether this process still runs."""
        return self._alive

    @property
    def used_bytes(self) -> int:
        """Bytes of content on the disk."""
        return self._machine.used_bytes

    @property
    def capacity_bytes(self) -> int | None:
        """How much content the disk holds; None: without limit."""
        return self._machine.capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, capacity: int | None) -> None:
        self._machine.capacity_bytes = capacity

    @property
    def on_operation(self) -> Callable[[Operation], Fault | None] | None:
        """Sees every operation before it happens and may make it fail."""
        return self._machine.on_operation

    @on_operation.setter
    def on_operation(self, hook: Callable[[Operation], Fault | None] | None) -> None:
        self._machine.on_operation = hook

    @property
    def journal(self) -> list[Operation] | None:
        """The changing operations so far; None: not recorded."""
        return self._machine.journal

    @journal.setter
    def journal(self, journal: list[Operation] | None) -> None:
        self._machine.journal = journal

    def fail_next(self, kind: str, error: int, *, path: str = "") -> None:
        """The next operation of this kind, on a path that contains `path`, fails with this errno."""
        self._machine.planned.append((kind, path, Fault(error)))

    def heal(self) -> None:
        """No fault is planned any more, and the disk has room."""
        self._machine.planned.clear()
        self._machine.on_operation = None
        self._machine.capacity_bytes = None

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Operations in this block meet no fault and are not recorded: an observer reads, not the machine."""
        machine = self._machine
        kept = machine.planned, machine.on_operation, machine.journal
        machine.planned, machine.on_operation, machine.journal = [], None, None
        try:
            yield
        finally:
            machine.planned, machine.on_operation, machine.journal = kept

    def flip_bit(self, path: Path, byte: int, bit: int) -> None:
        """Damage a file at rest, in the page cache and on the disk."""
        file = self._file(str(path))
        file.content[byte] ^= 1 << bit
        if byte < len(file.durable):
            file.durable[byte] ^= 1 << bit

    def another_process(self) -> SimFileSystem:
        """The file system of a further process on this machine."""
        return SimFileSystem(machine=self._machine)

    def crash_process(self) -> SimFileSystem:
        """The process dies. Returns the file system of the one that comes next."""
        self._die()
        return self.another_process()

    def crash_machine(self, rng: random.Random) -> SimFileSystem:
        """Power fails; what was not synced survives by chance. Returns the file system of the first process after."""
        return self.crash_machine_with(RandomSurvival(rng))

    def crash_machine_keeping(self, kept: int) -> SimFileSystem:
        """Power fails; of the `unsynced_changes`, exactly those survive whose bit of `kept` is set."""
        return self.crash_machine_with(ChosenSurvival(kept))

    def crash_machine_with(self, survival: Survival) -> SimFileSystem:
        """Power fails; `survival` chooses the unsynced changes that survive."""
        machine = self._machine
        for process in list(machine.processes.values()):
            process._die()
        settle(machine.root, survival)
        machine.look_anew()
        machine.boots += 1
        return self.another_process()

    @property
    def root(self) -> Directory:
        """The disk."""
        return self._machine.root

    def replace_disk(self, root: Directory) -> None:
        """Another disk is in the place of this one. Who reads may go on. Raises RuntimeError where a lock is held."""
        if any(handle.file.locked_by != -1 for handle in self._machine.handles.values()):
            raise RuntimeError("a process uses this disk")
        self._machine.root = root
        self._machine.look_anew()

    @property
    def unsynced_changes(self) -> int:
        """How many changes a crash of the machine could undo."""
        return pending_changes(self._machine.root)

    def copy(self) -> SimFileSystem:
        """The same disk once more, in a machine of its own with one process and no faults."""
        machine = self._machine
        root = copied(machine.root)
        copy = DiskMachine(machine.name, root, boots=machine.boots, last_number=machine.last_number)
        copy.last_pid, copy.last_id = machine.last_pid, machine.last_id
        copy.used_bytes, copy.capacity_bytes = machine.used_bytes, machine.capacity_bytes
        copy.index_directories()
        return SimFileSystem(machine=copy)

    def _die(self) -> None:
        self._alive = False
        machine = self._machine
        machine.processes.pop(self._pid, None)
        for fd in [fd for fd, handle in machine.handles.items() if handle.pid == self._pid]:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        file = self._machine.handles.pop(fd).file
        file.handles -= 1
        if file.locked_by == fd:
            file.locked_by = -1
        self._reclaim(file)

    def _reclaim(self, file: File) -> None:
        if file.names == 0 and file.handles == 0:
            self._machine.used_bytes -= len(file.content)

    def _ask(self, kind: str, path: str, position: int = 0, detail: bytes | int | str | None = None) -> Fault | None:
        """Raise the error of a fault that prevents the operation; return a fault that only cuts a write short."""
        if not self._alive:
            raise ProcessKilled(f"process {self._pid}: {kind} {path}")
        machine = self._machine
        if machine.on_operation is None and machine.journal is None and not machine.planned:
            return None
        operation = Operation(kind, path, position, detail)
        fault = self._planned(kind, path)
        if machine.on_operation is not None:
            fault = machine.on_operation(operation) or fault
        if machine.journal is not None and kind in CHANGING:
            machine.journal.append(operation)
        if fault is not None and not fault.kept_bytes:
            self._suffer(fault, operation)
        return fault

    def _planned(self, kind: str, path: str) -> Fault | None:
        for number, (planned_kind, part, fault) in enumerate(self._machine.planned):
            if planned_kind == kind and part in path:
                del self._machine.planned[number]
                return fault
        return None

    def _suffer(self, fault: Fault, operation: Operation) -> None:
        if fault.kills:
            self._die()
            raise ProcessKilled(f"process {self._pid}: {operation.kind} {operation.path}")
        if fault.errno:
            raise system_error(fault.errno, operation.path, sync=operation.kind in ("fsync", "sync_directory"))

    def open_beneath(self, directory: Path, relative: Path, flags: int) -> int:
        return self.open(directory / relative, flags)  # there are no symbolic links

    def open(self, path: Path, flags: int) -> int:
        name = str(path)
        directory, last = self._place(name)
        node = directory.entries.get(last)
        makes = bool(flags & os.O_CREAT) and node is None
        empties = bool(flags & os.O_TRUNC) and isinstance(node, File) and bool(node.content)
        self._ask("create" if makes or empties else "open", name)
        if isinstance(node, Directory):
            raise system_error(errno.EISDIR, name)
        if node is None:
            if not makes:
                raise system_error(errno.ENOENT, name)
            node = File(self._machine.number(), names=1)
            directory.change(Rename("", last, node))
        elif flags & os.O_EXCL:
            raise system_error(errno.EEXIST, name)
        if empties:
            self._cut(node, 0)
        node.handles += 1
        fd = self._machine.number()  # Never used twice: what holds an old handle gets EBADF.
        self._machine.handles[fd] = Handle(node, name, bool(flags & _WRITING), self._pid)
        return fd

    def close(self, fd: int, /) -> None:
        if self._alive:
            self._handle(fd)
            self._drop(fd)

    def pread(self, fd: int, length: int, position: int, /) -> bytes:
        handle = self._handle(fd)
        self._ask("pread", handle.path, position)
        return bytes(handle.file.content[position : position + length])

    def pread_into(self, fd: int, target: memoryview, position: int) -> int:
        data = self.pread(fd, len(target), position)
        target[: len(data)] = data
        return len(data)

    def pwritev(self, fd: int, views: Sequence[memoryview], position: int, /) -> int:
        handle = self._handle(fd)
        if not handle.writable:
            raise system_error(errno.EBADF, handle.path)
        data = b"".join(views)
        fault = self._ask("pwritev", handle.path, position, data)
        if fault is not None:
            data = data[: fault.kept_bytes]
        file, machine = handle.file, self._machine
        size = len(file.content)
        growth = max(0, position + len(data) - size)
        if machine.capacity_bytes is not None and growth > machine.capacity_bytes - machine.used_bytes:
            data = data[: max(0, max(size, size + machine.capacity_bytes - machine.used_bytes) - position)]
            if not data:
                raise system_error(errno.ENOSPC, handle.path)
            growth = max(0, position + len(data) - size)
        file.change(Write(position, data))
        machine.used_bytes += growth
        if fault is not None:
            self._suffer(fault, Operation("pwritev", handle.path, position, data))
        return len(data)

    def ftruncate(self, fd: int, length: int, /) -> None:
        handle = self._handle(fd)
        self._ask("ftruncate", handle.path, 0, length)
        self._cut(handle.file, length)

    def fsync(self, fd: int, /) -> None:
        handle = self._handle(fd)
        try:
            self._ask("fsync", handle.path)
        except OSError:
            handle.file.pending.clear()
            raise
        handle.file.sync()

    def size(self, fd: int) -> int:
        return len(self._handle(fd).file.content)

    def _handle(self, fd: int) -> Handle:
        handle = self._machine.handles.get(fd)
        if handle is None or handle.pid != self._pid:
            if not self._alive:
                raise ProcessKilled(f"process {self._pid}")
            raise system_error(errno.EBADF, f"handle {fd}")
        return handle

    def _cut(self, file: File, length: int) -> None:
        self._machine.used_bytes += length - len(file.content)
        file.change(Cut(length))

    def read_bytes(self, path: Path) -> bytes:
        name = str(path)
        self._ask("read_bytes", name)
        return bytes(self._file(name).content)

    def size_of(self, path: Path) -> int:
        node = self._find(str(path))
        return len(node.content) if isinstance(node, File) else -1

    def file_id(self, path: Path) -> tuple[int, int]:
        return 0, (self._find(str(path)) or self._file(str(path))).number

    def open_file_id(self, fd: int) -> tuple[int, int]:
        return 0, self._handle(fd).file.number

    def is_regular_file(self, fd: int) -> bool:
        return self._handle(fd) is not None

    def truncate(self, path: Path, length: int) -> None:
        name = str(path)
        self._ask("truncate", name, 0, length)
        self._cut(self._file(name), length)

    def free_bytes(self, path: Path) -> int:
        self._ask("free_bytes", str(path))
        machine = self._machine
        return sys.maxsize if machine.capacity_bytes is None else max(0, machine.capacity_bytes - machine.used_bytes)

    def rename(self, source: Path, target: Path) -> None:
        old, new = str(source), str(target)
        self._ask("rename", old, 0, new)
        directory, old_name = self._place(old)
        target_directory, new_name = self._place(new)
        node = directory.entries.get(old_name)
        if node is None:
            raise system_error(errno.ENOENT, old)
        if target_directory is not directory:
            raise system_error(errno.EXDEV, new)  # It would be two changes, with room for a crash between them.
        if old_name == new_name:
            return
        replaced = directory.entries.get(new_name)
        if isinstance(replaced, Directory):
            raise system_error(errno.EEXIST, new)
        directory.change(Rename(old_name, new_name, node))
        if replaced is not None:
            replaced.names -= 1
            self._reclaim(replaced)
        if isinstance(node, Directory):
            self._machine.index_directories()

    def unlink(self, path: Path) -> None:
        name = str(path)
        self._ask("unlink", name)
        file = self._file(name)
        directory, last = self._place(name)
        directory.change(Rename(last, "", file))
        file.names -= 1
        self._reclaim(file)

    def mkdir(self, path: Path) -> None:
        name = str(path)
        self._ask("mkdir", name)
        directory, last = self._place(name)
        if not path.is_absolute():
            raise system_error(errno.EINVAL, name)
        if last in directory.entries:
            raise system_error(errno.EEXIST, name)
        made = Directory(self._machine.number())
        directory.change(Rename("", last, made))
        self._machine.directories[name] = made

    def remove_tree(self, path: Path) -> None:
        name = str(path)
        self._ask("remove_tree", name)
        parent, last = self._place(name)
        directory = self._directory(name)
        for child_name, child in list(directory.entries.items()):
            if isinstance(child, Directory):
                self.remove_tree(path / child_name)
            else:
                self.unlink(path / child_name)
        parent.change(Rename(last, "", directory))
        del self._machine.directories[name]

    def list_directory(self, path: Path) -> list[str]:
        name = str(path)
        self._ask("list_directory", name)
        return sorted(self._directory(name).entries)

    def exists(self, path: Path) -> bool:
        return self._find(str(path)) is not None

    def is_directory(self, path: Path) -> bool:
        return str(path) in self._machine.directories

    def sync_directory(self, path: Path) -> None:
        name = str(path)
        self._ask("open", name)
        self._ask("sync_directory", name)
        self._directory(name).sync()

    def _place(self, path: str) -> tuple[Directory, str]:
        parent, name = place_of(path)
        return self._directory(parent), name

    def _directory(self, path: str) -> Directory:
        directory = self._machine.directories.get(path)
        if directory is None:
            raise system_error(errno.ENOENT, path)
        return directory

    def _find(self, path: str) -> Node | None:
        if not self._alive:
            raise ProcessKilled(f"process {self._pid}: {path}")
        parent, _, name = path.rpartition("/")
        directory = self._machine.directories.get(parent or "/")
        return None if directory is None else directory.entries.get(name) if name else directory

    def _file(self, path: str) -> File:
        node = self._find(path)
        if not isinstance(node, File):
            raise system_error(errno.ENOENT if node is None else errno.EISDIR, path)
        return node

    def lock(self, fd: int, *, wait_ms: int) -> bool:
        """There is one thread: nothing would change while it waited."""
        file = self._handle(fd).file
        if file.locked_by not in (-1, fd):
            return False
        file.locked_by = fd
        return True

    def lock_directory(self, path: Path, *, wait_ms: int) -> int | None:
        """As a lock of a file that nobody can delete."""
        self._find(name := str(path))  # A dead process locks nothing.
        directory = self._directory(name)
        file = self._machine.directory_locks.setdefault(name, File(0, names=1))
        if file.locked_by != -1:
            return None
        file.number = directory.number
        self._machine.last_lock -= 1
        file.handles += 1
        fd = file.locked_by = self._machine.last_lock
        self._machine.handles[fd] = Handle(file, name, False, self._pid)
        return fd

    def boot_id(self) -> str:
        return f"{self._machine.name}-boot-{self._machine.boots}"

    def process(self) -> ProcessIdentity:
        return ProcessIdentity(self._pid, self._machine.boots)

    def kill(self, process: ProcessIdentity, *, wait_ms: int) -> bool:
        victim = self._machine.processes.get(process.pid)
        if victim is None or victim is self or victim.process() != process:
            return False
        victim._die()
        return True

    def unique_id(self) -> str:
        self._machine.last_id += 1
        return f"{self._machine.name}-id-{self._machine.last_id}"
