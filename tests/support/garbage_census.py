"""A broker's process that tells what of it only a garbage collection would free: `run_broker` in place of its own.

Whoever wants to know makes a file of this name in the broker's directory for such questions (`TELL_IN`), named by the
broker's pid. The answer appears beside it: JSON, how many objects of each of our types were garbage since the last
question. Until then no collection comes.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from pathlib import Path

import msgspec

from spark_broker.broker import process
from spark_broker.broker.custody import LeaveRequest
from spark_broker.broker.spec import BrokerSpec

TELL_IN = "SPARK_BROKER_TEST_GARBAGE"
"""The environment variable that names the directory."""

LOOK_S = 0.05


def run_broker(spec: BrokerSpec, leave: LeaveRequest) -> str:
    """See `spark_broker.broker.process.run_broker`."""
    directory = Path(os.environ[TELL_IN])
    threading.Thread(target=_answer, args=(directory,), daemon=True).start()
    return process.run_broker(spec, leave)


def _answer(directory: Path) -> None:
    asked, never = directory / str(os.getpid()), threading.Event()
    gc.disable()
    while not never.wait(LOOK_S):
        if asked.exists():
            asked.unlink()
            answer = asked.with_suffix(".new")
            answer.write_bytes(msgspec.json.encode(_garbage()))
            answer.rename(asked.with_suffix(".json"))


def _garbage() -> dict[str, int]:
    gc.unfreeze()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = Counter(type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("spark_broker"))
    gc.garbage.clear()
    gc.set_debug(0)
    gc.unfreeze()  # the broker's own callback has frozen what was found
    gc.collect()
    return dict(found)
