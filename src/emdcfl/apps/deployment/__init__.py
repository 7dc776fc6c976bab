"""A federation as its operator keeps it: folder, certificates, processes, enrolment, runs. In a trial, the nodes are here, too."""

from __future__ import annotations

from emdcfl.apps.deployment.folder import Deployment, create
from emdcfl.apps.deployment.processes import down, up
from emdcfl.apps.deployment.report import report, wait_accepted
from emdcfl.apps.deployment.submit import submit

__all__ = ["Deployment", "create", "down", "report", "submit", "up", "wait_accepted"]
