"""Drives a coordinator of a simulated broker, as `broker.coordinator_thread` drives it in production."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_broker.broker.coordinator_runtime import CoordinatorRuntime
from spark_broker.broker.coordinator_thread import TICK_S

if TYPE_CHECKING:
    from spark_broker.testing.simulation.broker import BrokerProcess

PUMP_DELAY_MS = 0.05


class Driver:
    """Set `coordinator` before `start`, or before something wakes it."""

    def __init__(self, process: BrokerProcess, name: str) -> None:
        self._process = process
        self._name = name
        self._pump_due = False
        self.coordinator: CoordinatorRuntime[Any] | None = None

    def start(self) -> None:
        """Tick from now on."""
        self._tick_later(TICK_S * self._process.world.rng.random())

    def _tick_later(self, delay_s: float = TICK_S) -> None:
        scheduler = self._process.world.scheduler
        scheduler.push_quiet(scheduler.now_us + int(delay_s * 1e6), self._process, self._tick)

    def _tick(self) -> None:
        if self.coordinator is not None:
            self.coordinator.tick()
        self._tick_later()

    def wake(self) -> None:
        """There is something to pump."""
        if not self._pump_due:
            self._pump_due = True
            self._process.world.scheduler.after(PUMP_DELAY_MS, self._process, self._name, self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        if self.coordinator is not None:
            self.coordinator.pump()
