"""However a session ends, no process of its cluster is left: brokers, keepers, their daemons, the controller.

The ends in `local[2]` are in `test_local_session.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.session_process import SessionProcess

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

EXECUTORS = "local-cluster[2,2,1024]"


def test_no_end_of_a_session_on_executors_leaves_a_broker(tmp_path: Path) -> None:
    with SessionProcess(EXECUTORS, tmp_path) as session:
        session.begin()
        session.assert_no_end_leaves_a_broker()


@pytest.mark.parametrize("master", ["local[2]", EXECUTORS])
def test_a_killed_jvm_of_the_driver_leaves_no_broker(tmp_path: Path, master: str) -> None:
    with SessionProcess(master, tmp_path) as session:
        session.begin()
        session.kill("jvm")
        session.await_no_broker()
