"""`spark-broker doctor`: what this machine lacks for brokers and for history, and what a cluster suffers from."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from spark_broker.cli.cluster_state import default_state_file, running_cluster
from spark_broker.cli.options import Bootstrap, OutputFormat, OutputOption, open_admin
from spark_broker.cli.output import counted, print_json, print_table
from spark_broker.errors import SparkBrokerError

if TYPE_CHECKING:
    from spark_broker.client.admin import Admin
    from spark_broker.model import LogDirInfo

JAVA_MINIMUM = 17
JAVA_TIMEOUT_S = 30
PYTHON_MINIMUM = (3, 11)
PYSPARK = re.compile(r"4\.2\.")
DELTA_SPARK = "4.4.0"


class State(StrEnum):
    """What was found."""

    OK = "ok"
    MISSING = "missing"
    WRONG = "wrong"


class Finding(msgspec.Struct, frozen=True):
    """`needed_for`: who needs it. `next`: what to do; empty where it is ok."""

    what: str
    state: State
    found: str
    needed_for: str
    next: str = ""


def doctor(bootstrap_server: Bootstrap = "", output: OutputOption = OutputFormat.TABLE) -> None:
    """Say what is missing here for brokers and for history, and what is wrong in the cluster, if there is one.

    Status 1 when anything is missing or wrong.
    """
    findings = [_python(), _java(), _pyspark(), _delta_package(), _delta_jars(), _deltalake()]
    if bootstrap_server or running_cluster(default_state_file()) is not None:
        findings += _of_cluster(bootstrap_server)
    if output is OutputFormat.JSON:
        print_json(findings)
    else:
        rows = [(f.what, f.state, f.found, f.needed_for, f.next) for f in findings]
        print_table(("what", "state", "found", "needed for", "what to do"), rows)
    if any(finding.state is not State.OK for finding in findings):
        raise typer.Exit(1)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    state = State.OK if sys.version_info >= PYTHON_MINIMUM else State.WRONG
    return Finding("Python", state, version, "everything", "" if state is State.OK else "Install Python 3.11 or newer.")


def _java() -> Finding:
    """Where Spark looks: JAVA_HOME, then the PATH."""
    needed_for, advice = "brokers, DataFrames, tiering", "Install a JDK 17 or newer, or set JAVA_HOME to one."
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).exists():
        return Finding("Java", State.MISSING, java or "", needed_for, advice)
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=JAVA_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("Java", State.WRONG, f"{java}: {error}", needed_for, advice)
    version = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    if version is None or int(version[1]) < JAVA_MINIMUM:
        found = f"{version[1]} ({java})" if version else f"{java} does not say its version"
        return Finding("Java", State.WRONG, found, needed_for, advice)
    return Finding("Java", State.OK, f"{version[1]} ({java})", needed_for)


def _pyspark() -> Finding:
    version = _installed("pyspark")
    needed_for, advice = "brokers, DataFrames, tiering", "pip install 'spark-broker[spark]' (PySpark 4.2)."
    if version is None:
        return Finding("PySpark", State.MISSING, "", needed_for, advice)
    state = State.OK if PYSPARK.match(version) else State.WRONG
    return Finding("PySpark", state, version, needed_for, "" if state is State.OK else advice)


def _delta_package() -> Finding:
    version = _installed("delta-spark")
    advice = f"pip install delta-spark=={DELTA_SPARK}: the version for PySpark 4.2."
    if version is None:
        return Finding("delta-spark", State.MISSING, "", "history", advice)
    state = State.OK if version == DELTA_SPARK else State.WRONG
    return Finding("delta-spark", state, version, "history", "" if state is State.OK else advice)


def _delta_jars() -> Finding:
    """Those that a session takes if the user names none."""
    from spark_broker.spark.delta_session import HINT, JARS, downloaded_jars, installed_jars

    jars = installed_jars() or downloaded_jars()
    if not jars:
        return Finding("Delta's JARs", State.MISSING, "", "history", HINT)
    names = ", ".join(jar.name for jar in jars)
    if {jar.name for jar in jars} != set(JARS):
        advice = f"Put {' and '.join(JARS)} into {jars[0].parent} in place of these."
        return Finding("Delta's JARs", State.WRONG, f"{names} in {jars[0].parent}", "history", advice)
    return Finding("Delta's JARs", State.OK, f"in {jars[0].parent}", "history")


def _deltalake() -> Finding:
    version = _installed("deltalake")
    needed_for = "history in streams, and without Delta in Spark"
    if version is None:
        return Finding("deltalake", State.MISSING, "", needed_for, "pip install 'spark-broker[delta]'.")
    return Finding("deltalake", State.OK, version, needed_for)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _of_cluster(bootstrap_server: str) -> list[Finding]:
    """Whether the cluster answers; partitions without a leader, topics that are not tiered, replicas set aside."""
    try:
        with open_admin(bootstrap_server) as admin:
            return _answers(admin)
    except SparkBrokerError as error:
        return [Finding("cluster", State.MISSING, error.message, "clients", error.hint)]


def _answers(admin: Admin) -> list[Finding]:
    brokers = admin.describe_cluster().brokers
    findings = [Finding("cluster", State.OK, counted(len(brokers), "live broker", "live brokers"), "clients")]
    for name in admin.list_topics(include_internal=True):
        topic = admin.describe_topic(name)
        leaderless = [str(state.partition) for state in topic.partitions if state.leader is None]
        if leaderless:
            found = f"partitions without a leader: {', '.join(leaderless)}"
            findings.append(Finding(f"topic {name}", State.WRONG, found, "clients", "See docs/leaders.md."))
        if topic.history is not None and topic.history.stopped:
            found = f"tiering has stopped: {topic.history.stopped}"
            findings.append(Finding(f"topic {name}", State.WRONG, found, "history", "See docs/history.md."))
    return findings + [_set_aside(info) for info in admin.describe_log_dirs() if info.set_aside]


def _set_aside(info: LogDirInfo) -> Finding:
    kinds = Counter(found.kind for found in info.set_aside)
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    advice = "`spark-broker log-dirs describe` names them; see docs/backup.md."
    return Finding(f"broker {info.broker_id}", State.WRONG, f"replicas set aside: {found}", "operators", advice)
