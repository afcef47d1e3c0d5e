"""What every test may use: a wait with a deadline, and settings that make runs alike on every machine."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from hypothesis import HealthCheck, settings

from tests.support import spark_jvms
from tests.support.lanes import SPARK, Durations, LaneOfEachWorker, ProcessorTimes, begin_work, make_scheduler
from tests.support.sensitivity import Hunts, hunting_for_selected
from tests.support.stacks import StacksOfTests, StacksOfWorkers
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

# Where bytecode is not kept, every process compiles every module anew: three times the processor time of a start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# When pytest is run without make, executors take interpreter and interface from here: set before Spark starts its JVM.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
spark_jvms.use()
# A shell that runs this in its background has it ignore interrupts, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a slow machine is not a failure. Derandomized: `make test` gives the same answer twice; `full` explores.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
settings.register_profile(
    "full", deadline=None, max_examples=300, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

SPARK_TIMEOUT_S = 300
"""A test with real executors may have to wait for the start of its shared cluster."""

_TESTS = Path(__file__).parent

FAST_PATHS = ("tests/unit/", "tests/docs/", "tests/cli/", "tests/client/", "tests/storage/", "tests/test_tidy.py")
"""Files with tests that need no Spark, no Java and no process but their own."""

NOT_FAST = ("slow", "full", "alone", SPARK)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(StacksOfTests(session.config))
    begin_work(session.config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under tests/spark needs executors: it is marked `spark` and may take longer. Fast tests are marked."""
    for item in items:
        if item.path.is_relative_to(_TESTS / "spark"):
            item.add_marker(SPARK)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))
        if item.nodeid.startswith(FAST_PATHS) and not any(map(item.get_closest_marker, NOT_FAST)):
            item.add_marker("fast")


def pytest_collection_finish() -> None:
    """pytest's objects live to the end. The garbage collector would look through them in each full pass: 0.2 s."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("--hypothesis-seed")
    return f"Hypothesis draws from seed {seed}" if seed else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help="record what each file took in tests/DURATIONS.md")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTimes())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(LaneOfEachWorker())
        config.pluginmanager.register(StacksOfWorkers())
        alone = config.getoption("markexpr") == "alone"
        config.pluginmanager.register(Durations(alone, write=config.getoption("--write-durations")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Two cores are too few for two clusters of executors at a time."""
    return make_scheduler(config, log)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End at once: Flight servers that tests made in this process are never joined, and an ordinary exit would hang."""
    if "pyarrow.flight" in sys.modules and _exit_status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status)


_exit_status: int | None = None


def pytest_sessionfinish(exitstatus: int) -> None:
    """Remember the outcome for `pytest_unconfigure`."""
    global _exit_status  # noqa: PLW0603
    _exit_status = int(exitstatus)


class WaitUntil(Protocol):
    """`wait_until(condition, what, timeout_s=30)`."""

    def __call__(self, condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None: ...


@pytest.fixture(scope="module")
def hunts(request: pytest.FixtureRequest) -> Iterator[Hunts]:
    """What the module's `FIND` finds for each of its tests with the parameters `name` and `tries`."""
    yield from hunting_for_selected(request, request.module.FIND)


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine's clock shows another zone than UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    """Wait until `condition()` is true; fails with what was awaited once `timeout_s` seconds have passed."""

    def wait(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
        eventually(condition, timeout_s, what)

    return wait
