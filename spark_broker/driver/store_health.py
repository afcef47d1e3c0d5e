"""Whether the metadata store works: logs when it begins to fail, then once a minute, and when it works again."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger(__name__)

COMPLAIN_S = 60.0

FAILS = (
    "the metadata store fails (%s: %s). Until it works again nothing is decided: no elections, no changes of topics. "
    "Brokers that lead go on. Free its disk, or bring it back; the cluster needs no restart"
)


class StoreHealth:
    """The health of one store. Safe for use by many threads. `store`: its address, for messages.

    Lines are logged under the lock, so that the last one is true.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._trouble = ""  # empty: it works
        self._hangs = False
        self._since_s = 0.0
        self._next_complaint_s = 0.0
        self._worked_s = float("-inf")  # when it did something last

    @property
    def trouble(self) -> str:
        """How the store fails now; empty when it does not."""
        return self._trouble

    def hangs(self, since_s: float) -> None:
        """The store has not answered since this time (of the monotonic clock). Does not replace a failure's reason.

        Whoever waits may be late: a store that has answered meanwhile works, whatever was about to be said of it.
        """
        with self._lock:
            if self._trouble and not self._hangs:
                return
        self._note(f"no answer for {time.monotonic() - since_s:.0f} s", since_s, hangs=True)

    def fails(self, why: str) -> None:
        """The store refused what it was asked for."""
        self._note(why, time.monotonic(), hangs=False)

    def _note(self, why: str, since_s: float, *, hangs: bool) -> None:
        now_s = time.monotonic()
        with self._lock:
            if hangs and self._worked_s >= since_s:
                return
            if not self._trouble:
                self._since_s = since_s
            self._trouble, self._hangs = why, hangs
            if now_s >= self._next_complaint_s:
                self._next_complaint_s = now_s + COMPLAIN_S
                logger.warning(FAILS, self._store, why)

    def works(self) -> None:
        """The store did what it was asked for."""
        with self._lock:
            self._worked_s = time.monotonic()
            if self._trouble:
                logger.warning("the metadata store works again, after %.1f s", time.monotonic() - self._since_s)
            self._trouble, self._next_complaint_s = "", 0.0
