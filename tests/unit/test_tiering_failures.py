"""What becomes of Spark's errors: the next try, or a reason that says what is wrong."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from spark_broker.errors import TieringStoppedError
from spark_broker.history.steps import ConflictError
from spark_broker.history.table import failures


@dataclass
class JavaError:
    """A Java exception, as Py4J shows it."""

    text: str
    cause: JavaError | None = None
    _target_id: str = "o1"

    def toString(self) -> str:
        return self.text

    def getCause(self) -> JavaError | None:
        return self.cause


FULL = JavaError("java.io.IOException: No space left on device\n\tat somewhere")


def test_the_reason_names_the_last_cause() -> None:
    """Seen with a full disk: the task failed while writing rows, it said, and no word of the disk."""
    failed = JavaError("SparkException: Task failed", JavaError("TaskException", FULL))
    with pytest.raises(TieringStoppedError) as stopped, failures("the table cannot be written"):
        raise Py4JJavaError("an error", failed)
    expected = (
        "the table cannot be written: SparkException: Task failed (cause: java.io.IOException: No space left on device)"
    )
    assert stopped.value.message == expected


@pytest.mark.parametrize(
    "pages",
    [
        " SQLSTATE: 42K03",
        "; line 1 pos 7;\n'Project [id#1]",
        "\n\nJVM stacktrace:\norg.apache.spark",
        "\n\tat org.apache.spark",
        "\n== SQL ==\nSELECT",
    ],
)
def test_an_error_without_a_cause_is_said_whole_and_without_sparks_pages(pages: str) -> None:
    with pytest.raises(TieringStoppedError) as stopped, failures("the table cannot be read"):
        raise PySparkException(f"[MISSES] It misses two:\n\n  a feature,\n  and another.{pages}")
    expected = "the table cannot be read: [MISSES] It misses two: a feature, and another."
    assert stopped.value.message.removesuffix("; line 1 pos 7") == expected


def test_a_job_that_a_neighbour_has_cancelled_is_tried_again() -> None:
    cancelled = JavaError("SparkException: [SPARK_JOB_CANCELLED] Job 9 cancelled as part of cancellation of all jobs")
    with pytest.raises(ConflictError, match="Job 9"), failures("the table cannot be written"):
        raise Py4JJavaError("an error", cancelled)
