"""The thread that moves bytes between sockets and this process: the standard library's loop, with a name and a fate.

A server has one of its own. The clients of a process share one, which their first connection begins (`client_loop`).
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable

from spark_broker.errors import NoThreadError
from spark_broker.threads import Fate, Worker, start

SCRATCH_BYTES = 64 * 1024


class IoLoop(Worker):
    """Calls back when sockets are ready or time has passed. An error of ours in a callback is the thread's end.

    asyncio itself would log such an error, and go on without the connection.
    """

    def __init__(self, name: str, fate: Fate) -> None:
        super().__init__(name, fate)
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self.loop.set_exception_handler(self._failed)
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        """Where this thread receives small frames of all connections, one after the other."""

        self._error: BaseException | None = None

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.get_ident() == self.ident

    def begin(self) -> None:
        """Start the thread. Raises NoThreadError."""
        try:
            start(self)
        except (RuntimeError, NoThreadError):
            self.loop.close()
            raise

    def soon(self, callback: Callable[[], object]) -> bool:
        """Have the loop's thread call this. From any thread. Returns False if the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self.loop.is_closed():
                raise
            return False
        return True

    def work(self) -> None:
        self.loop.run_forever()
        error = self._error
        self.loop.close()
        if error is not None:
            raise error

    def fail(self, error: BaseException) -> None:
        """End the thread by an error of ours that another thread met. From any thread."""
        self.soon(lambda: self._failed(self.loop, {"exception": error}))

    def abandon(self) -> None:
        """In a forked child: close its descriptors of the parent's loop, which goes on."""
        self._selector.close()

    def stop(self) -> None:
        """End the thread. From any thread."""
        self.soon(self.loop.stop)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        self._error = error if isinstance(error, BaseException) else RuntimeError(str(context.get("message")))
        loop.stop()
