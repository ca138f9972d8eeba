"""The command line: verbs only. Each one calls the library, then prints one JSON document or tables.

Documents and tables go to standard output; progress, warnings and errors to standard error. Exit codes are
those of `report.failure.ExitCode`.
"""

from kernelbraid.cli import (
    ablations,
    agents,
    operators,
    pages,
    profiles,
    rollouts,
    studies,
    submissions,
    training,
    travel,
)
from kernelbraid.cli.application import app, main

__all__ = [
    "ablations",
    "agents",
    "app",
    "main",
    "operators",
    "pages",
    "profiles",
    "rollouts",
    "studies",
    "submissions",
    "training",
    "travel",
]
