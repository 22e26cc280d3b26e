"""Deploys as Prefect's users know them: flows, for schedulers, triggers and CI.

Only this package imports Prefect. It runs against a server of one's own, or with none (Prefect
then starts one on loopback for the run). Parameters, artifacts and logs hold no secret:
credentials come from the environment of the run, or from Secret blocks that a parameter names.
Nothing is cached by Prefect: what was done already is known by the origin itself, and steps are
safe to run again.
"""

from __future__ import annotations

import logging
import os

# Prefect reports usage to its makers unless it is told not to, and reads this when imported.
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")

from warmcast.manifests.errors import WarmcastError


class _OneLine(logging.Filter):
    """Our errors say in one line what is wrong; Prefect would log each with two tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, without the traceback of an error of ours."""
        if record.exc_info and isinstance(record.exc_info[1], WarmcastError):
            record.exc_info = None
        return True


for _name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(_name).addFilter(_OneLine())
