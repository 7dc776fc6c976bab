"""A whole federation on one machine, as it would be on many: certificates, node keys, a SuperLink and its SuperNodes on loopback."""

from __future__ import annotations

from emdcfl.apps.trial.folder import Trial, create
from emdcfl.apps.trial.processes import down, up
from emdcfl.apps.trial.report import report, wait_accepted
from emdcfl.apps.trial.submit import submit

__all__ = ["Trial", "create", "down", "report", "submit", "up", "wait_accepted"]
