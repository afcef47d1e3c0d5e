"""A Python process of Spark's prints nothing of a socket that Spark has closed, and everything else."""

from __future__ import annotations

import sys
import traceback

import pytest

from spark_broker import quiet_end
from spark_broker.quiet_end import end_in_silence


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As in such a process. Afterwards this process prints as before."""
    monkeypatch.setattr(traceback, "print_exc", traceback.print_exc)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(quiet_end, "is_worker", lambda: request.param)
    end_in_silence.cache_clear()
    end_in_silence()
    end_in_silence.cache_clear()


def printed(error: Exception) -> None:
    """Both ways in which Python prints what nobody has caught."""
    try:
        raise error
    except Exception:  # noqa: BLE001 (any)
        traceback.print_exc()
    sys.excepthook(type(error), error, None)


@pytest.mark.parametrize("quiet", [True], indirect=True)
@pytest.mark.usefixtures("quiet")
def test_a_broken_pipe_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    printed(BrokenPipeError("gone"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("quiet", [True], indirect=True)
@pytest.mark.usefixtures("quiet")
def test_any_other_error_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    printed(ValueError("a bug"))
    assert capsys.readouterr().err.count("ValueError: a bug") == 2


@pytest.mark.parametrize("quiet", [False], indirect=True)
@pytest.mark.usefixtures("quiet")
def test_in_any_other_process_nothing_is_changed(capsys: pytest.CaptureFixture[str]) -> None:
    printed(BrokenPipeError("gone"))
    assert capsys.readouterr().err.count("BrokenPipeError: gone") == 2
