"""What a user can do to a Spark application from its web page: kill jobs and stages."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

TIMEOUT_S = 30.0


class SparkUi:
    """The page at `http://host:port`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def running(self, what: str) -> list[int]:
        """Ids of the running "jobs", or of the active "stages"."""
        status, key = {"jobs": ("running", "jobId"), "stages": ("active", "stageId")}[what]
        (application, *_) = self._get("/api/v1/applications")
        listed = self._get(f"/api/v1/applications/{application['id']}/{what}?status={status}")
        return [int(entry[key]) for entry in listed]

    def kill(self, what: str) -> int:
        """Kill every running job, or every active stage; returns how many."""
        path = {"jobs": "/jobs/job/kill/", "stages": "/stages/stage/kill/"}[what]
        ids = self.running(what)
        for number in ids:
            request = urllib.request.Request(f"{self._url}{path}?id={number}", method="POST")
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                pass
        return len(ids)

    def speculated(self) -> int:
        """How many copies of tasks Spark has made of slow ones."""
        (application, *_) = self._get("/api/v1/applications")
        stages = self._get(f"/api/v1/applications/{application['id']}/stages?details=true")
        return sum(bool(task["speculative"]) for stage in stages for task in stage["tasks"].values())

    def _get(self, path: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(self._url + path, timeout=TIMEOUT_S) as answer:
            entries: list[dict[str, Any]] = json.load(answer)
        return entries
