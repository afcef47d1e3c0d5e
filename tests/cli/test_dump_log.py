"""`spark-broker dump-log`: shows every batch of real segment files, and finds every kind of damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.storage.logs import OPEN, open_log
