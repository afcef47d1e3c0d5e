"""What is wrong with the options of a read or a write. One place gives the hint."""

from __future__ import annotations

from spark_broker.errors import InvalidConfigError
from spark_broker.pages import page

HINT = f"Every option of reads and writes, its values and its default: {page('dataframes')}."


def invalid_option(message: str) -> InvalidConfigError:
    """The error for an option, or a use of the data source, that cannot be."""
    return InvalidConfigError(message, hint=HINT)
