"""The pages of the documentation, as errors and the command line name them. A wheel brings them along."""

from __future__ import annotations


def page(name: str) -> str:
    """How to find the page: its file in a checkout, and the command that shows it wherever the package is installed."""
    return f"docs/{name}.md (`spark-broker docs {name}`)"
