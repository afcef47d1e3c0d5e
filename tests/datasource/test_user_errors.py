"""A user's mistake reaches the user as a message. Only then is Spark asked to leave out the Python traceback."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from spark_broker.errors import InvalidConfigError, InvariantError, SparkBrokerError
from spark_broker.spark.user_errors import HIDE_TRACEBACK, message_alone
from tests.datasource.conftest import MakeRead


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process looks like one of Spark's."""
    monkeypatch.setenv(HIDE_TRACEBACK, "")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="pyspark.daemon"))


def raised(error: Exception) -> str:
    with pytest.raises(type(error)), message_alone():
        raise error
    return os.environ.get(HIDE_TRACEBACK, "")


@pytest.mark.usefixtures("worker")
def test_a_users_error_in_a_worker_comes_without_its_traceback() -> None:
    assert raised(InvalidConfigError("no such option")) == "1"


@pytest.mark.usefixtures("worker")
def test_a_bug_of_ours_keeps_its_traceback() -> None:
    assert raised(InvariantError("two leaders")) == ""


def test_another_process_than_a_worker_is_left_as_it_is() -> None:
    assert HIDE_TRACEBACK not in os.environ
    raised(InvalidConfigError("no such option"))
    assert HIDE_TRACEBACK not in os.environ


@pytest.mark.usefixtures("worker")
def test_each_step_of_a_read_is_covered(read: MakeRead) -> None:
    with pytest.raises(SparkBrokerError):
        read(subscribe="nowhere")
    assert os.environ[HIDE_TRACEBACK] == "1"
