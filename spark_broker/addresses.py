"""Addresses as people write them: `host:port`. A host of IPv6 is in brackets, because it has colons itself."""

from __future__ import annotations


def address_text(host: str, port: int) -> str:
    """`host:port`, which `bootstrap.servers` takes."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def without_brackets(host: str) -> str:
    """The host as the system takes it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
