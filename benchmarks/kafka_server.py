"""A real Kafka of one broker on this machine, from Maven's packages, to compare our figures with."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spark_broker.errors import InvalidConfigError

HERE = Path(__file__).resolve().parent / "kafka"
START_TIMEOUT_S = 60
HEAP = "1g"


def jars(pom: str, target: Path) -> list[Path]:
    """Copy the packages that `kafka/<pom>` names, with dependencies, to a directory. Raises InvalidConfigError."""
    target.mkdir(parents=True, exist_ok=True)
    command = ["mvn", "-q", "-B", "-f", str(HERE / pom), "dependency:copy-dependencies", "-DincludeScope=runtime"]
    try:
        run = subprocess.run([*command, f"-DoutputDirectory={target}"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise InvalidConfigError("Maven is not installed: it brings Kafka and its connector") from None
    if run.returncode:
        raise InvalidConfigError(f"Maven could not bring {pom}: {run.stdout[-2000:]}")
    return sorted(target.glob("*.jar"))


@contextmanager
def kafka(base: Path, partitions: int) -> Iterator[str]:
    """`host:port` of a Kafka that creates topics on first use. Raises InvalidConfigError when it does not start."""
    classpath = str(jars("server.xml", base / "server") and base / "server") + "/*"
    port, controller_port = _free_ports(2)
    settings = base / "server.properties"
    settings.write_text(_properties(base / "data", port, controller_port, partitions), encoding="utf-8")
    java = [str(Path(os.environ["JAVA_HOME"]) / "bin" / "java"), f"-Xmx{HEAP}", f"-Xms{HEAP}", "-cp", classpath]
    cluster_id = uuid.uuid4().hex[:22]
    tool = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(settings), "--standalone"]
    subprocess.run([*java, *tool], check=True, capture_output=True)
    with (base / "kafka.log").open("wb") as log:
        server = subprocess.Popen([*java, "kafka.Kafka", str(settings)], stdout=log, stderr=subprocess.STDOUT)
    try:
        _await_port(port, server, base / "kafka.log")
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def steady_kafka(base: Path, servers: str, topic: str, rate: int, seconds: int) -> list[str]:
    """The command of Kafka's own producer, at this rate of records of 100 bytes. `base`: the one that `kafka` was
    given.
    """
    java = [str(Path(os.environ["JAVA_HOME"]) / "bin" / "java"), "-cp", f"{base / 'server'}/*"]
    size = ["--num-records", str(rate * seconds), "--record-size", "100", "--throughput", str(rate)]
    properties = ["--producer-props", f"bootstrap.servers={servers}", "acks=all"]
    return [*java, "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, *size, *properties]


def _properties(data: Path, port: int, controller_port: int, partitions: int) -> str:
    settings = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller_port}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": data,
        "num.partitions": partitions,
        "log.message.timestamp.type": "LogAppendTime",
        "offsets.topic.replication.factor": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "group.initial.rebalance.delay.ms": 0,
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def _await_port(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until and server.poll() is None:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        with suppress(subprocess.TimeoutExpired):
            server.wait(0.1)
    raise InvalidConfigError(f"Kafka did not start: {log.read_text()[-2000:]}")
