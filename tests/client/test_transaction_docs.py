"""The examples of docs/transactions.md run as they are printed, one after the other."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.client.fake_broker import FakeCluster
from tests.client.test_transactions import committed

PAGE = Path(__file__).parents[2] / "docs" / "transactions.md"


def test_the_examples_do_what_the_page_says(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("orders", "audit", "upper"):
        cluster.create(name)
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 5
    for number, example in enumerate(examples):
        script = tmp_path / f"example_{number}.py"
        script.write_text(example)
        runpy.run_path(str(script), {"servers": cluster.bootstrap})
    assert committed(cluster, "audit") == [["order 1 was taken"]]
    assert committed(cluster, "orders") == [["book", "one more", "first task", "second task"]]
    assert committed(cluster, "upper") == [["BOOK", "ONE MORE"]]
    assert capsys.readouterr().out == "True 7\n"
    assert cluster.committed["upper", "orders", 0].offset == 3, "behind `one more`: 0 book, 1 a marker, 2 one more"
