"""The session in which tiering runs takes nothing of the user's over."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
from pyspark import RDD
from pyspark.sql import SparkSession

from spark_broker.history.tierer import own_session


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """A session of the user, without a JVM."""
    monkeypatch.setattr(SparkSession, "_should_update_active_session", staticmethod(lambda: False))
    monkeypatch.setattr(SparkSession, "_get_j_spark_session_class", staticmethod(lambda _: MagicMock()))
    monkeypatch.setattr(SparkSession, "_get_j_spark_session_module", staticmethod(lambda _: MagicMock()))
    monkeypatch.setattr("pyspark.sql.session.install_exception_handler", lambda: None)
    monkeypatch.setattr(RDD, "toDF", None, raising=False)
    return SparkSession(MagicMock(), MagicMock())


def test_frames_that_a_user_makes_of_rdds_are_of_the_users_session(users: SparkSession) -> None:
    """Story: after the first run of tiering, `rdd.toDF()` of a notebook made frames in UTC, which its own session could
    not see as views.
    """
    made_by, settings = RDD.toDF, users.conf
    own = own_session(users)
    assert RDD.toDF is made_by
    assert own._jsparkSession is users._jsparkSession.cloneSession()
    assert users.conf is settings
    assert own.conf is not settings
    assert own.conf._jconf is own._jsparkSession.conf()
    assert own.sparkContext is users.sparkContext
