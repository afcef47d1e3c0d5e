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
from spark_broker.cli.health import suffering
from spark_broker.cli.options import Bootstrap, OutputFormat, OutputOption, open_admin
from spark_broker.cli.output import abridged, counted, print_json, print_table
from spark_broker.errors import SparkBrokerError
from spark_broker.pages import page
from spark_broker.troubles import Trouble

if TYPE_CHECKING:
    from spark_broker.client.admin import Admin
    from spark_broker.model import BrokerInfo

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
        ended = subprocess.run([java, "-version"], capture_output=True, timeout=JAVA_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("Java", State.WRONG, f"{java}: {error}", needed_for, advice)
    # Java repeats JAVA_TOOL_OPTIONS as they are, in whatever encoding.
    version = re.search(rb'version "(?:1\.)?(\d+)', ended.stderr + ended.stdout)
    if version is None or int(version[1]) < JAVA_MINIMUM:
        found = f"{int(version[1])} ({java})" if version else f"{java} does not say its version"
        return Finding("Java", State.WRONG, found, needed_for, advice)
    return Finding("Java", State.OK, f"{int(version[1])} ({java})", needed_for)


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
    """Whether the cluster answers, and what it suffers from. One question without an answer hides no other answer."""
    found: list[Finding] = []
    with open_admin(bootstrap_server) as admin:
        for question in (_brokers, _topics, _set_aside):
            try:
                found += question(admin)
            except SparkBrokerError as error:
                if not found:
                    return [Finding("cluster", State.MISSING, error.message, "clients", error.hint)]
                found.append(Finding("cluster", State.WRONG, error.message, "clients", error.hint))
    return found


def _brokers(admin: Admin) -> list[Finding]:
    brokers = admin.describe_cluster(include_fenced=True).brokers
    live = [broker for broker in brokers if not broker.fenced]
    fenced = f", {len(brokers) - len(live)} fenced" if len(live) < len(brokers) else ""
    findings = [Finding("cluster", State.OK, counted(len(live), "live broker", "live brokers") + fenced, "clients")]
    for broker in brokers:
        if broker.fenced:
            found = f"fenced, so it leads nothing: {_FENCED_BECAUSE} ({broker.address}, pid {broker.pid})"
            findings.append(Finding(f"broker {broker.id}", State.WRONG, found, "clients", _fenced_advice(broker)))
    return findings


_FENCED_BECAUSE = "the controller does not hear of it, its clock is wrong, or it still opens its logs"
"""Clients are not told which of these it is."""


def _fenced_advice(broker: BrokerInfo) -> str:
    log = f"Its log, {broker.log}, says why" if broker.log else "Its log says why"
    patience = "do not end it while it opens its logs after a crash"
    return f"{log}: {patience}. Else look at its process, its machine and the clock there; see {page('hosting')}."


def _topics(admin: Admin) -> list[Finding]:
    """Partitions that suffer, and topics that are not tiered."""
    findings: list[Finding] = []
    for topic in admin.describe_topics(include_internal=True):
        suffers = suffering(topic)
        for trouble, (says, advice) in _OF_PARTITIONS.items():
            partitions = [str(each.partition.partition) for each in suffers if trouble in each.troubles]
            if partitions:
                found = f"{says}: {abridged(partitions)}"
                findings.append(Finding(f"topic {topic.name}", State.WRONG, found, "clients", advice))
        if topic.history is not None and topic.history.stopped:
            found = f"tiering has stopped: {topic.history.stopped}"
            findings.append(Finding(f"topic {topic.name}", State.WRONG, found, "history", f"See {page('history')}."))
    return findings


_OF_PARTITIONS = {
    Trouble.OFFLINE: ("partitions without a leader", f"See {page('leaders')}."),
    Trouble.UNDER_MIN_ISR: (
        "partitions under min.insync.replicas, which refuse acks=all",
        f"Wait for replicas to rejoin the ISR, or bring their brokers back; see {page('leaders')}.",
    ),
    Trouble.UNDER_REPLICATED: (
        "under-replicated partitions",
        "Bring the brokers of their replicas back: `spark-broker topics describe` names them.",
    ),
}


def _set_aside(admin: Admin) -> list[Finding]:
    findings = []
    for info in admin.describe_log_dirs():
        if info.set_aside:
            kinds = Counter(found.kind for found in info.set_aside)
            found = f"replicas set aside: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}"
            advice = f"`spark-broker log-dirs describe` names them; see {page('backup')}."
            findings.append(Finding(f"broker {info.broker_id}", State.WRONG, found, "operators", advice))
    return findings
