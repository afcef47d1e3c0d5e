"""Settings: parsing, errors that help, and the files that are generated from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_broker.client.topic_changes import settings_of
from spark_broker.config import (
    ClusterConfig,
    Config,
    ConsumerConfig,
    ProducerConfig,
    TopicConfig,
    keywords_module,
    load_cluster_settings,
    reference_markdown,
    sample_toml,
)
from spark_broker.errors import InvalidConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_the_sample_file_and_the_reference_are_those_that_the_code_generates() -> None:
    assert (ROOT / "conf" / "cluster.toml").read_text() == sample_toml(), "run `make docs`"
    assert (ROOT / "docs" / "configuration.md").read_text() == reference_markdown(), "run `make docs`"
    assert (ROOT / "spark_broker" / "client" / "keywords.py").read_text() == keywords_module(), "run `make docs`"


def test_every_line_of_the_sample_file_can_be_uncommented_and_gives_the_defaults(tmp_path: Path) -> None:
    lines = sample_toml().splitlines()
    uncommented = [line[1:] if line.startswith("#") and not line.startswith("# ") else line for line in lines]
    path = tmp_path / "cluster.toml"
    path.write_text("\n".join(uncommented))
    assert sum(" = " in line and not line.startswith("#") for line in uncommented) > 40
    settings = load_cluster_settings(path)
    assert settings.cluster == ClusterConfig()
    assert settings.topic == TopicConfig()


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"min.insync.replica": 2}, "'min.insync.replicas'"),
        ({"broker.sesion.timeout.ms": 2}, "'broker.session.timeout.ms'"),
    ],
)
def test_an_unknown_setting_names_the_nearest_known_one(values: dict[str, object], names: str) -> None:
    with pytest.raises(InvalidConfigError, match="did you mean") as caught:
        load_cluster_settings(values)
    assert names in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[cluster]\nnum.partitons = 3", "num.partitions"),
        ("[clutser]\nnum.partitions = 3", "did you mean 'cluster'"),
        ("[cluster]\nnum.partitions = 'three'", "not a whole number"),
        ("[cluster]\nnum.partitions = 0", "at least 1"),
        ("[cluster", "cluster.toml"),
        ('"log.dirs" = "/data"\n[cluster]\n', "'log.dirs' stands in no table; it belongs below [cluster]"),
        ("retention.ms = 1\n", "'retention.ms' stands in no table; it belongs below [topic]"),
        ('[cluster]\nlog.dirs = "/a"\n"log.dirs" = "/b"', "log.dirs has two values, '/a' and '/b'"),
        ('[topic]\n"segment.bytes" = 1048576\nsegment = {bytes = 2097152}', "segment.bytes has two values"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfigError) as caught:
        load_cluster_settings(path)
    assert says in str(caught.value)


def test_a_setting_that_a_file_repeats_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[cluster]\nlog.dirs = "/a"\n"log.dirs" = "/a"\n')
    assert load_cluster_settings(path).cluster.log_dirs == load_cluster_settings({"log.dirs": "/a"}).cluster.log_dirs


def test_a_missing_file_is_an_error_and_not_the_defaults(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="does not exist"):
        load_cluster_settings(tmp_path / "no.toml")


def test_values_may_be_text_and_come_back_as_text() -> None:
    config = ProducerConfig.parse({"linger.ms": "7", "enable.idempotence": "false", "bootstrap.servers": "a:1,b:2"})
    assert (config.linger_ms, config.enable_idempotence, config.bootstrap_servers) == (7, False, ("a:1", "b:2"))
    assert ProducerConfig.parse(config.to_dict()) == config


@pytest.mark.parametrize("name", ["a,b", " a", "a ", ""])
def test_a_name_that_would_be_read_as_others_is_in_no_list(name: str) -> None:
    """Story: the column `a,b` as the key made the columns `a` and `b` the key."""
    with pytest.raises(InvalidConfigError, match="cannot be in a list"):
        settings_of({"key.columns": ["id", name]})
    with pytest.raises(InvalidConfigError, match="cannot be in a list"):
        TopicConfig.parse({"key.columns": ("id", name)}).to_dict()
    assert settings_of({"key.columns": ["id", "a b"]}) == {"key.columns": "id,a b"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((ConsumerConfig, name) for name in ("fetch.min.bytes", "fetch.max.bytes", "max.partition.fetch.bytes")),
        *((ClusterConfig, name) for name in ("replica.fetch.max.bytes", "replica.fetch.response.max.bytes")),
    ],
)
def test_a_size_is_one_that_a_message_can_hold(kind: type[Config], name: str) -> None:
    """Story: with 2 GiB, every fetch was refused, and tried again, without a word."""
    assert name in kind.parse({name: 2**31 - 1}).given()
    with pytest.raises(InvalidConfigError, match=name):
        kind.parse({name: 2**31})
