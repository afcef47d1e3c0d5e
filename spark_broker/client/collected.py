"""A consumer that is garbage collected without `close`: its threads end, and its group gets its partitions at once."""

from __future__ import annotations

import logging
import weakref
from functools import partial

from spark_broker.client.consumer_threads import ConsumerThreads
from spark_broker.client.rebalancing import LEAVE_WAIT_S
from spark_broker.client.retry import Deadline
from spark_broker.threads import begin
from spark_broker.transport.origin import Origin

_log = logging.getLogger(__name__)


def end_with(consumer: object, threads: ConsumerThreads) -> None:
    """End the threads, which know nothing of the consumer, once nobody has it any more."""
    weakref.finalize(consumer, _collected, threads, Origin()).atexit = False


def _collected(threads: ConsumerThreads, origin: Origin) -> None:
    # The garbage collector runs in any thread, whatever locks it holds. So another thread does the work.
    if not threads.machine.closed and not origin.is_elsewhere:
        begin("collected-consumer", threads.died, partial(_end, threads))


def _end(threads: ConsumerThreads) -> None:
    _log.warning("a consumer was garbage collected without close(): what it read last is not committed")
    with threads.lock:
        group = threads.machine.group
        if group is not None and threads.machine.is_member:
            group.left(threads.now_ms(), "it was garbage collected")
            threads.machine.reading_changed()
            threads.advance()
            limit = Deadline.after_ms(LEAVE_WAIT_S * 1000)
            while group.membership.is_leaving and not limit.expired:
                threads.wait(limit.remaining_s)
    threads.close()
