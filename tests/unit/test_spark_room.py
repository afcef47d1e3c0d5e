"""Too few executors are said early and with numbers; directories are absolute, or temporary and gone afterwards."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import pytest

from spark_broker.broker.spec import BrokerOutcome, BrokerSpec
from spark_broker.config import ClusterConfig, load_cluster_settings
from spark_broker.driver.cluster import BrokerCluster
from spark_broker.driver.directories import choose_directories, cluster_ids_in
from spark_broker.driver.executors import Executor
from spark_broker.driver.hosts import HostListener
from spark_broker.driver.launcher import BrokerLauncher, LaunchController, SpecMaker
from spark_broker.driver.master import is_local, is_loopback
from spark_broker.driver.replication import with_default_replication
from spark_broker.driver.room import check_resource, check_settings_for_room, wait_for_executors
from spark_broker.errors import ClusterStartError, InvalidConfigError, UnsupportedSparkError
from spark_broker.storage.checkpoints import write_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FAR_AWAY = math.inf


def context(master: str, **conf: str) -> Any:
    """The part of a SparkContext that these checks use."""
    settings = {name.replace("_", "."): value for name, value in conf.items()}
    return SimpleNamespace(master=master, getConf=lambda: settings)


HEAD = context("spark://head:7077")


class Executors:
    """While a caller waits, executors come one by one, up to `limit`."""

    def __init__(self, limit: int, *, cores: int = 2, needs_executors: bool = True) -> None:
        self.needs_executors = needs_executors
        self._limit = limit
        self._cores = cores
        self._there: list[Executor] = []

    def wait_executors(self, enough: Callable[[Sequence[Executor]], bool], timeout_s: float) -> list[Executor]:
        del timeout_s
        while not enough(self._there) and len(self._there) < self._limit:
            self._there.append(Executor(str(len(self._there)), "h", self._cores))
        return list(self._there)


@pytest.mark.parametrize("master", ["local-cluster[2,2,1024]", "spark://head:7077"])
def test_fewer_executors_than_brokers_is_an_error_that_names_both(master: str) -> None:
    with pytest.raises(ClusterStartError, match=r"3 brokers need 3 executors.* has 2"):
        check_settings_for_room(context(master, spark_executor_instances="2"), 3)


def test_local_sessions_need_no_executor_per_broker() -> None:
    check_settings_for_room(context("local[2]"), 3)
    shared = Executors(0, needs_executors=False)
    wait_for_executors(shared, context("local[2]"), 3, FAR_AWAY, lambda *_: pytest.fail("nothing is awaited"))


def test_no_brokers_is_an_error() -> None:
    with pytest.raises(ClusterStartError, match="at least one"):
        check_settings_for_room(context("local[2]"), 0)


def test_waiting_reports_each_executor_and_ends_with_the_last() -> None:
    told: list[tuple[str, int, int]] = []

    wait_for_executors(Executors(5), HEAD, 3, FAR_AWAY, lambda *progress: told.append(progress))

    assert told == [("executors", 1, 3), ("executors", 2, 3), ("executors", 3, 3)]


def test_a_number_of_executors_that_stays_too_small_is_an_error_before_the_deadline() -> None:
    with pytest.raises(ClusterStartError, match="has 2"):
        wait_for_executors(Executors(2), HEAD, 3, FAR_AWAY, lambda *_: None, settle_s=0.05)


@pytest.mark.parametrize(
    ("given", "brokers", "shared", "factor"),
    [(0, 1, False, 1), (0, 2, False, 2), (0, 3, False, 3), (0, 9, False, 3), (0, 3, True, 1), (1, 3, False, 1)],
)
def test_a_topic_that_does_not_say_has_three_replicas_where_there_are_executors_for_them(
    given: int, brokers: int, shared: bool, factor: int
) -> None:
    settings = load_cluster_settings({"default.replication.factor": given})
    assert (
        with_default_replication(settings, brokers, shared_executor=shared).cluster.default_replication_factor == factor
    )


@pytest.mark.parametrize("conf", [{}, {"spark_task_cpus": "2"}])
@pytest.mark.parametrize("master", ["local", "local[1]", "local-cluster[3,1,1024]", "spark://head:7077"])
def test_a_master_that_leaves_no_slot_for_queries_is_refused_with_what_to_use_instead(
    master: str, conf: dict[str, str]
) -> None:
    settings = {"spark_executor_instances": "3", "spark_executor_cores": "1", **conf}
    with pytest.raises(
        UnsupportedSparkError, match=r"every query would wait for ever -> (Use local\[2\]|Give the exec)"
    ):
        check_settings_for_room(context(master, **settings), 3)


def test_cores_that_one_task_takes_count_as_one_slot() -> None:
    check_settings_for_room(context("local-cluster[3,2,1024]"), 3)
    with pytest.raises(UnsupportedSparkError, match=r"local-cluster\[3,4,1024\]"):
        check_settings_for_room(context("local-cluster[3,2,1024]", spark_task_cpus="2"), 3)


def test_a_spare_executor_is_room_enough() -> None:
    check_settings_for_room(context("local-cluster[4,1,1024]"), 3)
    wait_for_executors(Executors(4, cores=1), HEAD, 3, FAR_AWAY, lambda *_: None, settle_s=0.05)


def test_executors_that_turn_out_to_have_no_free_slot_are_refused() -> None:
    """A standalone master does not say beforehand how many cores an executor will have."""
    with pytest.raises(UnsupportedSparkError, match="3 executors with 3 cores in all have no task slot left"):
        wait_for_executors(Executors(3, cores=1), HEAD, 3, FAR_AWAY, lambda *_: None, settle_s=0.05)


@pytest.mark.parametrize(
    ("master", "brokers", "taken", "hint"),
    [
        ("local[2]", 1, 1, r"2 task slots, of which other clusters .* take 1: .* -> Use local\[3\], or more\. Or stop"),
        ("local[3]", 3, 2, r"-> Use local\[4\]"),
        ("local-cluster[3,2,1024]", 3, 3, "beside 3 brokers and 3 of other clusters in this session: .* Or stop"),
        ("local-cluster[2,2,1024]", 1, 3, "beside 1 brokers and 3 of other"),
    ],
)
def test_the_slots_of_other_clusters_are_not_free(master: str, brokers: int, taken: int, hint: str) -> None:
    """A notebook's first cell that is run twice: both clusters started, and the next query waited for ever."""
    check_settings_for_room(context(master), brokers, taken - 1)
    with pytest.raises(UnsupportedSparkError, match=hint):
        check_settings_for_room(context(master), brokers, taken)


def test_executors_of_which_other_clusters_take_the_slots_are_refused() -> None:
    wait_for_executors(Executors(3), HEAD, 3, FAR_AWAY, lambda *_: None, settle_s=0.05, taken=2)
    with pytest.raises(UnsupportedSparkError, match="beside 3 brokers and 3 of other clusters"):
        wait_for_executors(Executors(3), HEAD, 3, FAR_AWAY, lambda *_: None, settle_s=0.05, taken=3)


def test_a_second_cluster_in_a_session_is_refused_where_it_takes_the_last_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    sc, other_sc = context("local[2]"), context("local[2]")
    launcher = BrokerLauncher(SharedExecutor(), cast("LaunchController", None), cast("SpecMaker", None))
    first = SimpleNamespace(_spark=SimpleNamespace(sparkContext=sc), _launcher=launcher, metadata_dir="/data/metadata")
    monkeypatch.setattr("spark_broker.driver.cluster.check_session", lambda spark: None)
    monkeypatch.setattr(BrokerCluster, "running", lambda: [first])
    opened: list[Any] = []

    def open_cluster(spark: Any, settings: object, **_: object) -> NoReturn:
        opened.append(spark.sparkContext)
        raise InvalidConfigError("far enough")

    monkeypatch.setattr(BrokerCluster, "_open", open_cluster)
    launcher.add_slot()
    launcher.add_slot()
    assert launcher.task_slots == 1, "all brokers share the executor, and its keeper"
    with pytest.raises(UnsupportedSparkError, match="other clusters of this session take 1"):
        BrokerCluster.start(cast("SparkSession", SimpleNamespace(sparkContext=sc)), 1)
    with pytest.raises(InvalidConfigError, match="far enough"):
        BrokerCluster.start(cast("SparkSession", SimpleNamespace(sparkContext=other_sc)), 1)
    with pytest.raises(InvalidConfigError, match="far enough"):  # It is refused, or takes over the first one's slot.
        BrokerCluster.start(cast("SparkSession", SimpleNamespace(sparkContext=sc)), 1, {"log.dirs": "/data"})
    launcher.stop(0.0)
    assert launcher.task_slots == 0
    with pytest.raises(InvalidConfigError, match="far enough"):
        BrokerCluster.start(cast("SparkSession", SimpleNamespace(sparkContext=sc)), 1)
    assert opened == [other_sc, sc, sc]


class SharedExecutor:
    """A host without an executor as yet: brokers wait for it."""

    shared_executor = True
    trouble = ""

    def open(self, listener: HostListener) -> None: ...
    def executors(self) -> list[Executor]:
        return []

    def run(self, executor: Executor, spec: BrokerSpec) -> BrokerOutcome:
        raise AssertionError("there is no executor")

    def close(self) -> None: ...


def test_the_broker_resource_is_refused_where_executors_do_not_have_it() -> None:
    config = ClusterConfig(broker_executor_resource=True)

    with pytest.raises(UnsupportedSparkError, match=r"spark\.executor\.resource\.broker\.amount"):
        check_resource(context("local-cluster[3,2,1024]"), config)
    check_resource(context("local-cluster[3,2,1024]", spark_executor_resource_broker_amount="1"), config)


@pytest.mark.parametrize(
    ("master", "local", "loopback"),
    [
        ("local", True, True),
        ("local[*]", True, True),
        ("local[4,2]", True, True),
        ("local-cluster[3,2,1024]", False, True),
        ("spark://head:7077", False, False),
        ("yarn", False, False),
    ],
)
def test_masters_are_told_apart(master: str, local: bool, loopback: bool) -> None:
    assert (is_local(master), is_loopback(master)) == (local, loopback)


def test_without_log_dirs_the_data_is_temporary_and_goes(caplog: pytest.LogCaptureFixture) -> None:
    directories = choose_directories(ClusterConfig(), "app-1")

    assert Path(directories.log_dirs).is_dir()
    assert "removed when the cluster stops" in caplog.text

    directories.remove_temporary()
    assert not Path(directories.log_dirs).exists()


def test_given_directories_are_made_absolute_and_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    directories = choose_directories(ClusterConfig(log_dirs="data"), "app-1")
    directories.remove_temporary()

    assert directories.log_dirs == str(tmp_path / "data")
    assert directories.metadata_dir == str(tmp_path / "data" / "metadata")
    assert Path(directories.log_dirs).is_dir()


def test_a_metadata_url_is_left_as_it_is(tmp_path: Path) -> None:
    config = ClusterConfig(log_dirs=str(tmp_path), metadata_dir="s3://bucket/cluster")

    assert choose_directories(config, "app-1").metadata_dir == "s3://bucket/cluster"


@pytest.mark.parametrize("form", ["{}", "file:{}"])
def test_a_path_in_hadoops_form_is_the_same_path(tmp_path: Path, form: str) -> None:
    """Story: `file:/srv/meta` was a directory `file:` below the working directory. Backups were of an empty one."""
    config = ClusterConfig(log_dirs=form.format(tmp_path / "logs"), metadata_dir=form.format(tmp_path / "meta"))
    directories = choose_directories(config, "app-1")
    assert (directories.log_dirs, directories.metadata_dir) == (str(tmp_path / "logs"), str(tmp_path / "meta"))


@pytest.mark.parametrize("given", ["s3:/bucket/meta", "file:meta", "file:", "hdfs:/meta"])
def test_what_is_neither_a_path_nor_a_url_is_refused(tmp_path: Path, given: str) -> None:
    for name, config in (
        ("metadata.dir", ClusterConfig(log_dirs=str(tmp_path), metadata_dir=given)),
        ("log.dirs", ClusterConfig(log_dirs=given)),
    ):
        with pytest.raises(InvalidConfigError, match=f"{name} = '{given}' is neither a path nor a URL"):
            choose_directories(config, "app-1")


def test_log_dirs_that_cannot_be_made_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(InvalidConfigError, match=r"log\.dirs"):
        choose_directories(ClusterConfig(log_dirs=str(tmp_path / "file" / "below")), "app-1")


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS])
def test_only_brokers_need_log_dirs_where_the_metadata_lies_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Story: a driver's pod had no volume for records, as the page says. Its cluster did not start."""
    log_dirs = str(tmp_path / "srv" / "logs")

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    directories = choose_directories(ClusterConfig(log_dirs=log_dirs, metadata_dir="s3://bucket/cluster"), "app-1")
    assert directories.log_dirs == log_dirs
    with pytest.raises(InvalidConfigError, match="cannot be made"):
        choose_directories(ClusterConfig(log_dirs=log_dirs), "app-1")


def test_links_in_log_dirs_are_left_to_the_machines_of_the_brokers(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    config = ClusterConfig(log_dirs=str(tmp_path / "x" / ".." / "data" / "logs"))
    assert choose_directories(config, "app-1").log_dirs == str(tmp_path / "data" / "logs")


def test_clusters_are_found_by_their_log_directories(tmp_path: Path) -> None:
    for number, cluster_id in enumerate(("b", "a", "b")):
        (tmp_path / f"broker-{number}").mkdir()
        meta = {"cluster_id": cluster_id, "directory_id": f"d{number}", "boot_id": "x"}
        write_checkpoint(tmp_path / f"broker-{number}" / "meta.json", meta)
    (tmp_path / "broker-9").mkdir()
    (tmp_path / "broker-10").touch()
    (tmp_path / "broker-11" / "meta.json").mkdir(parents=True)
    (tmp_path / "broker-12").mkdir()
    (tmp_path / "broker-12" / "meta.json").write_bytes(b"")
    (tmp_path / "broker-13").mkdir()
    (tmp_path / "broker-13" / "meta.json").symlink_to("meta.json")  # Any error of a disk kept the cluster down.

    assert cluster_ids_in(str(tmp_path)) == ["a", "b"]
