"""Runs on disk: the folder, the records, checkpoints, progress and the report."""

from stackalign.runs import figures, records, tabular_figures
from stackalign.runs.checkpoints import Restored, commit, restore, resume, save
from stackalign.runs.folder import FREE, RESULTS, Run, create, open_, require_free
from stackalign.runs.progress import Bars
from stackalign.runs.report import build, summarise

__all__ = [
    "FREE",
    "RESULTS",
    "Bars",
    "Restored",
    "Run",
    "build",
    "commit",
    "create",
    "figures",
    "open_",
    "records",
    "require_free",
    "restore",
    "resume",
    "save",
    "summarise",
    "tabular_figures",
]
