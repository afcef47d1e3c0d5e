"""A plugin of coverage for `make coverage`: saves again and again, because tests kill brokers and executors."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import coverage

if TYPE_CHECKING:
    from coverage.plugin_support import Plugins

INTERVAL_S = 1.0


def coverage_init(registry: Plugins, options: object) -> None:
    """Called in each process that coverage measures."""
    del registry, options
    threading.Thread(target=_save, name="coverage saver", daemon=True).start()


def _save() -> None:
    pause = threading.Event()
    while not pause.wait(INTERVAL_S):
        measured = coverage.Coverage.current()
        if measured is not None:
            measured.save()
