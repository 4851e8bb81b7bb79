"""Writes the report of one or more runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from rlmath.config.run_files import COMPARED_FILE, REPORT_FILE, write_whole
from rlmath.config.schema import Config
from rlmath.report.page import build_page
from rlmath.report.run_folder import read_runs

logger = logging.getLogger(__name__)


class NoPlotlyError(RuntimeError):
    """plotly is not installed."""


def write_report(
    folders: Sequence[str | Path], output: Path | None = None, evaluations: Sequence[Path] = ()
) -> Path:
    """Write the report of the runs in these folders and return its path.

    The path is `output`, by default `report.html` in the folder or `compared.html` in the first of
    several. `evaluations` are folders of evaluations of their models. Errors: NoRunError,
    NoPlotlyError, OSError."""
    plotly_js = read_plotly()
    runs = read_runs(folders, evaluations)
    path = (
        Path(folders[0]) / (REPORT_FILE if len(folders) == 1 else COMPARED_FILE)
        if output is None
        else output
    )
    text = build_page(runs, plotly_js, datetime.now())
    write_whole(path, text.encode("utf-8", errors="backslashreplace"))
    return path


def write_run_report(config: Config) -> None:
    """Write `report.html` into the run's folder, if `telemetry.report` says so.

    An error is only logged."""
    if not config.telemetry.report:
        return
    try:
        path = write_report([config.run.output_dir])
    except NoPlotlyError as error:
        logger.info("No report: %s", error)
    except Exception as error:
        logger.warning("The report could not be written: %s: %s", type(error).__name__, error)
    else:
        logger.info("The report is in %s", path)


def read_plotly() -> str:
    """The source of plotly.js that plotly brings.

    Errors: NoPlotlyError."""
    if find_spec("plotly") is None:
        raise NoPlotlyError("plotly is not installed; `pip install plotly narwhals` installs it")
    from plotly.offline import get_plotlyjs  # here, because it takes part of a second

    source = get_plotlyjs()
    if "</script" in source.lower() or "<!--" in source:
        raise NoPlotlyError("the source of this version of plotly.js cannot stand in a page")
    return source
