"""The standard streams of a command: what is closed, what is full, and whose reader has left."""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Output(io.RawIOBase):
    """Standard output. It remembers what went wrong with it, and can be told to let everything go.

    `fd` None: it is closed (`>&-`), and refuses what is written, as the system does.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._dropped = False
        self.failed: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        if self._fd is None:
            raise io.UnsupportedOperation("standard output is closed")
        return self._fd

    def isatty(self) -> bool:
        return self._fd is not None and os.isatty(self._fd)

    def write(self, data: ReadableBuffer, /) -> int:
        if self._dropped:
            return memoryview(data).nbytes
        try:
            if self._fd is None:
                raise OSError(errno.EBADF, "it is closed")
            return _written(self._fd, data)
        except OSError as error:
            self.failed = error
            raise

    def drop(self) -> None:
        """What is left goes nowhere. Python would complain once more when it flushes at exit."""
        self._dropped = True


def _written(fd: int, data: ReadableBuffer) -> int:
    """A pipe or terminal with O_NONBLOCK may be full for a while: that is no failure."""
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:
            select.select([], [fd], [])


def arrivals(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """What a stream brings, as it arrives, up to its end: at most `size` bytes at once.

    Another process that has the pipe or terminal may have set O_NONBLOCK, which all of them share. A buffered reader
    says `b""` then whenever there is nothing yet, as it does at the end. So the file itself is read.
    """
    file = getattr(stream, "raw", None)
    if not isinstance(file, io.FileIO):
        read = getattr(stream, "read1", stream.read)
        yield from iter(lambda: read(size), b"")
        return
    while (data := file.read(size)) != b"":
        if data is None:
            select.select([file], [], [])
        else:
            yield data


@contextmanager
def answers_awaited() -> Iterator[None]:
    """Whoever asks at the terminal waits for the answer, also where another process has set O_NONBLOCK."""
    fd = sys.stdin.fileno()
    blocking = os.get_blocking(fd)
    os.set_blocking(fd, True)
    try:
        yield
    finally:
        os.set_blocking(fd, blocking)


def take_streams() -> Output | None:
    """The process's standard streams, those that are closed too: Python has None in their place. Input is empty then.

    Returns its output; None: somebody has put something else there, who knows what is written to it.
    """
    if sys.stdin is None:
        sys.stdin = _null("rb")
    if sys.stderr is None:
        sys.stderr = _null("wb")
    before = cast("TextIO | None", sys.stdout)
    if before is None:
        return _put(Output(None), "utf-8", "backslashreplace", line_buffering=False)
    if not isinstance(before, io.TextIOWrapper):
        return None
    raw: object = before.buffer
    unbuffered = not isinstance(raw, io.BufferedWriter)  # PYTHONUNBUFFERED
    raw = raw.raw if isinstance(raw, io.BufferedWriter) else raw
    if not isinstance(raw, io.FileIO):
        return None
    before.flush()
    line_buffering = before.line_buffering or unbuffered
    errors = _lenient(before.encoding, before.errors or "strict")
    return _put(Output(raw.fileno()), before.encoding, errors, line_buffering=line_buffering)


def _lenient(encoding: str, errors: str) -> str:
    """How to write what the encoding does not have. Text is for people: `\\u0141` is better than no record at all."""
    escapes_bytes = errors == "surrogateescape" and codecs.lookup(encoding).name == "utf-8"
    return errors if escapes_bytes or errors not in ("strict", "surrogateescape") else "backslashreplace"


def _put(output: Output, encoding: str, errors: str, *, line_buffering: bool) -> Output:
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(output), encoding, errors, line_buffering=line_buffering)
    return output


def _null(mode: str) -> TextIO:
    return io.TextIOWrapper(cast("io.BufferedIOBase", Path(os.devnull).open(mode)))  # type: ignore[type-var]
