"""The lines that every benchmark prints, a JSON object for each figure, and its --device."""

from __future__ import annotations

import argparse
import json
import math

from rlmath.planning.checks import cuda_problems


def print_figure(
    bench: str,
    case: str,
    metric: str,
    value: float,
    unit: str,
    *,
    baseline: str | None = None,
    ratio: float | None = None,
) -> None:
    """Print a figure as a line of JSON.

    `baseline` names what the value is measured against in the same run, `ratio` is how many times
    better ours is."""
    line = {
        "bench": bench,
        "case": case,
        "metric": metric,
        "value": rounded(value, 5),
        "unit": unit,
        "baseline": baseline,
        "ratio": None if ratio is None else rounded(ratio, 4),
    }
    print(json.dumps(line), flush=True)


def rounded(value: float, digits: int) -> float:
    """Round to so many significant digits; whole numbers stay.

    >>> rounded(1234.56, 3), rounded(0.0123456, 3), rounded(7, 3)
    (1230.0, 0.0123, 7)
    """
    return value if isinstance(value, int) or math.isnan(value) else float(f"{value:.{digits}g}")


def existing_device(name: str) -> str:
    """The value of --device; "cuda" needs a GPU."""
    for problem in cuda_problems(name, "--device"):
        raise argparse.ArgumentTypeError(problem)
    return name
