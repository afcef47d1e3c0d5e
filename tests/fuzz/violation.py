"""What a judge of the fuzzer raises beside an error of its own."""

from __future__ import annotations


class ViolationError(Exception):
    """An accepted input that does not keep what acceptance promises."""
