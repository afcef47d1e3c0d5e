"""A plugin of pytest (`-p tests.sim.put_in`): the tests run with the bug that the variable PUT_IN names."""

from __future__ import annotations

import os

import pytest

from tests.sim import sensitivity
from tests.sim.bugs import BUGS

assert sensitivity.FILES, "importing it registers the bugs"
BUGS[os.environ["PUT_IN"]].put_in(pytest.MonkeyPatch())
