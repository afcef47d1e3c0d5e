"""What a client's constructor takes: bootstrap addresses, and settings as keywords or as a mapping of dotted names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from spark_broker.addresses import address_text, without_brackets
from spark_broker.config import Config
from spark_broker.digits import digits
from spark_broker.errors import InvalidConfigError
from spark_broker.visible import shown

C = TypeVar("C", bound=Config)

_HOST = re.compile(r"[\w.-]+|\[[\w.:%]+\]")
"""A name, or an address of IPv4 or IPv6: what stands in a URL as it is."""


class Address(NamedTuple):
    """Where a broker listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return address_text(self.host, self.port)


def client_config(
    kind: type[C],
    bootstrap_servers: str | Sequence[str] | None,
    config: Mapping[str, object] | None,
    keywords: Mapping[str, object],
) -> C:
    """The client's settings. Keywords (`linger_ms=5`) win over `config` (`{"linger.ms": 5}`). None means "not given".

    Raises InvalidConfigError. It names the nearest known setting for one that is unknown.
    """
    values = {} if config is None else _settings(config)
    values.update({name.replace("_", "."): value for name, value in keywords.items() if value is not None})
    if bootstrap_servers is not None:
        values["bootstrap.servers"] = bootstrap_servers
    return kind.parse(values)


def _settings(config: object) -> dict[str, object]:
    if not isinstance(config, Mapping):
        raise InvalidConfigError(f"config is {type(config).__name__}; give a dict by dotted names")
    for name in config:
        if not isinstance(name, str):
            raise InvalidConfigError(f"a setting's name is {type(name).__name__}: {shown(name)}")
    return dict(config)


def parse_addresses(servers: Sequence[str]) -> tuple[Address, ...]:
    """The addresses of `bootstrap.servers`, each once. Raises InvalidConfigError that names each bad one."""
    if not servers:
        raise InvalidConfigError("bootstrap.servers is empty; give one `host:port` or more")
    bad = [server for server in servers if _parse(server) is None]
    if bad:
        raise InvalidConfigError(f"bootstrap.servers: {', '.join(map(repr, bad))} is not `host:port`")
    return tuple(dict.fromkeys(address for address in map(_parse, servers) if address is not None))


def _parse(server: str) -> Address | None:
    host, separator, port = server.strip().rpartition(":")
    number = digits(port)
    if not separator or not host or number is None or not 0 < number < 65_536:
        return None
    return Address(without_brackets(host), number) if _HOST.fullmatch(host) else None
