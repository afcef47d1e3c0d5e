"""A thread that dies is the end of its process or its client, or it begins again; and it is an ERROR in the log."""

from __future__ import annotations

import ast
import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_broker import threads
from spark_broker.errors import NoThreadError
from spark_broker.threads import BeginAgain, begin, client_ended, ready_pool

PACKAGE = Path(__file__).parents[2] / "spark_broker"
ROOTS = (PACKAGE, PACKAGE.parent / "jobs", PACKAGE.parent / "pyspark_spark_broker")
STARTERS = {"Thread", "Timer", "start_new_thread", "ThreadPoolExecutor", "ready_pool"}
POOLS = {
    # Their work's results are taken, each of them, so nothing that it raises is lost.
    "broker/log_opener.py": ("ThreadPoolExecutor", "helper.result()"),
    "driver/controller_loop.py": ("ready_pool", "the loop waits for each result"),
    "driver/controller_service.py": ("ready_pool", "_probed"),
}


def starts(source: str) -> list[str]:
    """What in this module starts a thread by itself. `x.Thread` counts where x is a name: Java has a Thread, too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.append(node.attr)
        elif isinstance(node, ast.Name):
            found.append(node.id)
        elif isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names]
    return sorted(set(found) & STARTERS)


def test_the_finder_finds_each_way_to_start_a_thread() -> None:
    assert starts("import threading\nthreading.Thread(target=f).start()") == ["Thread"]
    assert starts("from threading import Thread\nclass A(Thread): ...") == ["Thread"]
    assert starts("from threading import Thread as T") == ["Thread"]
    assert starts("pool = ThreadPoolExecutor(1)") == ["ThreadPoolExecutor"]
    assert starts("Worker('a', f)") == []


@pytest.mark.slow
def test_every_thread_of_ours_is_a_worker() -> None:
    found = {
        str(path.relative_to(PACKAGE)) if root is PACKAGE else str(path): names
        for root in ROOTS
        for path in root.rglob("*.py")
        if path != PACKAGE / "threads.py"
        and "simulation" not in path.parts  # it has no threads, and a Timer of its own
        and (names := starts(path.read_text(encoding="utf-8")))
    }
    assert found == {path: [name] for path, (name, _) in POOLS.items()}


def raw_starts(source: str) -> list[str]:
    """What this module starts by its own `start` method: a Worker's raises RuntimeError where there is no thread."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "start"
        if not node.args and not node.keywords
    ]


def test_a_driver_and_a_client_meet_a_typed_error_where_there_is_no_thread() -> None:
    """They begin their threads by `threads.begin` or `threads.start`. No other error would be awaited there."""
    found = [
        start
        for part in ("driver", "history", "client", "cli")
        for path in (PACKAGE / part).rglob("*.py")
        for start in raw_starts(path.read_text(encoding="utf-8"))
    ]
    assert found == ["self._tiering.start()"], "a schedule, which begins its thread so"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PAUSE_S", 0.0)


class Failing:
    """Work that raises `error` the first `times` times."""

    def __init__(self, error: BaseException, times: int = 1) -> None:
        self.error, self.times, self.runs = error, times, 0

    def __call__(self) -> None:
        self.runs += 1
        if self.runs <= self.times:
            raise self.error


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def test_what_the_work_raises_is_logged_and_its_fate_is_called_once(caplog: pytest.LogCaptureFixture) -> None:
    fates, bug = list[BaseException](), ValueError("a bug")
    begin("one", fates.append, Failing(bug)).join(10)
    assert fates == [bug]
    assert errors_of(caplog) == ["thread one ended on an unexpected error: ValueError('a bug')"]


def test_work_that_begins_again_goes_on_and_each_time_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    work = Failing(ValueError("a bug"), times=2)
    begin("two", BeginAgain(), work).join(10)
    assert work.runs == 3
    assert errors_of(caplog).count("thread two begins again") == 2


def test_work_that_is_over_does_not_begin_again() -> None:
    work = Failing(ValueError("a bug"), times=9)
    begin("three", BeginAgain(lambda: True), work).join(10)
    assert work.runs == 1


def test_the_end_of_the_process_ends_a_thread_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    fates = list[BaseException]()
    begin("four", fates.append, Failing(SystemExit())).join(10)
    assert (fates, errors_of(caplog)) == ([], [])


def test_a_limit_of_the_process_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    begin("five", lambda _: None, Failing(MemoryError())).join(10)
    (line,) = errors_of(caplog)
    assert line.startswith("thread five ended on a limit of the process: [NO_MEMORY] MemoryError; ")


def test_a_thread_that_cannot_start_is_a_typed_error_that_names_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(NoThreadError, match=r"this process has .* threads; .*kernel\.threads-max"):
        begin("six", lambda _: None, lambda: None)


@pytest.mark.parametrize("there_are", range(3))
def test_the_threads_of_a_ready_pool_run_before_there_is_work(monkeypatch: pytest.MonkeyPatch, there_are: int) -> None:
    """Whoever hands work in meets no limit: he who makes the pool does, however many threads it has got."""
    start, left = threading.Thread.start, iter(range(there_are))

    def few(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    pool = ready_pool(3, "nine")
    monkeypatch.setattr(threading.Thread, "start", few)
    with pytest.raises(NoThreadError):
        ready_pool(3, "ten")
    meet = threading.Barrier(3)
    met = [pool.submit(meet.wait, 10) for _ in range(3)]
    assert sorted(each.result(10) for each in met) == [0, 1, 2]
    pool.shutdown()


def test_the_error_of_a_client_names_its_thread() -> None:
    ended = list[str]()
    begin("seven", lambda error: ended.append(str(client_ended(error))), Failing(ValueError("a bug"))).join(10)
    assert ended[0].startswith("[CLIENT_ENDED] seven ended: ValueError: a bug -> ")
    assert "report" in ended[0]
    begin("eight", lambda error: ended.append(str(client_ended(error))), Failing(MemoryError())).join(10)
    assert "MemoryError" in ended[1]
    assert "report" not in ended[1]


def out_of_memory(*_: object, **__: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("where", ["limit_reached", "logger"])
def test_the_fate_of_a_thread_follows_also_where_there_is_no_memory_to_tell_of_it(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Story: a thread that died without memory ended in silence, and its process lived on without it."""
    broken = SimpleNamespace(error=out_of_memory) if where == "logger" else out_of_memory
    monkeypatch.setattr(threads, where, broken)
    fates, error = list[BaseException](), MemoryError()
    begin("eleven", fates.append, Failing(error)).join(10)
    assert fates == [error]
