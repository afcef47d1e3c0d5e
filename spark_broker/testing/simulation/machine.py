"""A simulated machine: a disk, clocks, and at most one broker's process that is meant to run on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_broker.testing.simulation.filesystem import SimFileSystem
from spark_broker.testing.simulation.network import Address
from spark_broker.testing.simulation.scheduler import Scheduler

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess

EPOCH_MS = 1_700_000_000_000
"""The wall clock at the beginning of every schedule."""


class MachineClock:
    """The clocks of one machine: boot time starts again with every boot, and the wall clock may be wrong."""

    def __init__(self, scheduler: Scheduler, skew_ms: int) -> None:
        self._scheduler = scheduler
        self._booted_us = scheduler.now_us - 1_000_000
        self.skew_ms = skew_ms

    def reboot(self) -> None:
        self._booted_us = self._scheduler.now_us - 1_000_000

    def boottime_ms(self) -> int:
        return (self._scheduler.now_us - self._booted_us) // 1000

    def wall_ms(self) -> int:
        return EPOCH_MS + self._scheduler.now_us // 1000 + self.skew_ms


class SimulatedMachine:
    """`incomplete`: unsynced data was lost, and the controller does not know it yet."""

    def __init__(self, number: int, scheduler: Scheduler, skew_ms: int) -> None:
        self.number = number
        self.host = f"b{number}"
        self.address: Address = (self.host, 9092)
        self.clock = MachineClock(scheduler, skew_ms)
        self.fs = SimFileSystem(self.host)  # of its operator: each broker has a process of its own
        self.process: BrokerProcess | None = None
        self.launching = False  # a launch number was asked for, or the process is about to start
        self.powered = True
        self.incomplete = False
        self.restored = False  # from an older copy, and the controller does not know it yet
        self.broker_id = -1

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.alive

    def __repr__(self) -> str:
        return self.host
