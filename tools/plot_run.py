"""Draw a metric of one or more runs over the steps, as an SVG.

    python tools/plot_run.py outputs/demo outputs/demo-2 --metric task_reward --output curve.svg

Hand-written SVG: the same numbers give the same bytes. It has a background of its own, for light and dark
pages.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rlmath.config.terminal import escape_terminal, visible
from rlmath.trainer.telemetry.metrics_writer import read_metrics

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 48, 60
"""Margins around the plot (SVG units)."""

MOST = 1e300
"""Larger values are left out, as those that are not finite: the axis could not be computed."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette, which the colour-blind can distinguish."""

DASHES = ("", "7 4", "2 3")
"""Lines from the eighth on differ by their dashes."""

UNITS = {
    "task_reward": "mean reward of a completion",
    "final_reward": "mean reward of a completion, KL penalty included",
    "rollout/rewards": "mean reward of a completion",
    "avg_seq_len": "tokens",
    "avg_prompt_len": "tokens",
    "rollout/response_length": "tokens",
    "no_eos_ratio": "share of completions",
    "actor_clip_ratio": "share of tokens",
    "ppo_approx_kl": "nats",
    "kl_reward": "nats",
    "train/entropy_loss": "nats per token",
}
"""What the metric is measured in, for the axis; names that end in "seconds" or "per_second" contain it."""


@dataclass(frozen=True)
class Curve:
    label: str
    points: tuple[tuple[int, float], ...]
    """(step, value) by rising step."""


@dataclass(frozen=True)
class Axis:
    """A linear scale from `low` .. `high` onto `start` .. `end` (SVG units), with its ticks."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def main(arguments: list[str] | None = None) -> int:
    """Writes the picture; 1 and a line on stderr when a run has no such metric."""
    escape_terminal()
    parser = argparse.ArgumentParser(
        description="Draw a metric of one or more runs over the steps, as an SVG."
    )
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="folders of runs (run.output_dir)")
    parser.add_argument(
        "--metric", default="task_reward", help="name in metrics.jsonl (default: task_reward)"
    )
    parser.add_argument("--output", required=True, help="file to write, .svg")
    parser.add_argument("--title", help="headline (default: the metric's name)")
    options = parser.parse_args(arguments)
    try:
        labels = _labels(options.run_dirs)
        curves = [
            read_curve(run_dir, label, options.metric)
            for run_dir, label in zip(options.run_dirs, labels, strict=True)
        ]
        output = Path(options.output)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(draw(curves, options.metric, options.title or options.metric), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 1
    return 0


def _labels(run_dirs: Sequence[str]) -> list[str]:
    """The folders' names, or their paths where two names are the same; of long ones the end."""
    names = [Path(run_dir).resolve().name for run_dir in run_dirs]
    labels = names if len(set(names)) == len(names) else run_dirs
    return [label if len(label) <= 40 else f"…{label[-39:]}" for label in map(visible, labels)]


def read_curve(run_dir: str, label: str, metric: str) -> Curve:
    """Raises ValueError when the run has no finite value of the metric; its other metrics are named."""
    rows = read_metrics(run_dir)
    found = ((int(row["step"]), row.get(metric, math.nan)) for row in rows)
    points = [(step, value) for step, value in found if abs(value) <= MOST]
    if not points:
        known = sorted({name for row in rows for name in row} - {"step"})
        raise ValueError(
            f"{run_dir} has no finite value of {metric!r}; it has {', '.join(known) or 'no metrics'}"
        )
    return Curve(label, tuple(points))


def nice_ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten that enclose low .. high, about `most` of them at the most.

    >>> nice_ticks(-4.2, 3.9, 6)
    (-6.0, -4.0, -2.0, 0.0, 2.0, 4.0)
    """
    if high - low <= 1e-12 * max(1.0, abs(low), abs(high)):
        half = max(1.0, abs(low)) / 2
        low, high = low - half, high + half
    magnitude = 10.0 ** math.floor(math.log10((high - low) / (most - 1)))
    factor = next(
        f for f in (1, 2, 5, 10, 20) if math.ceil(high / (f * magnitude)) - low / (f * magnitude) <= most
    )
    step = factor * magnitude
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(float(f"{number * step:.12g}") for number in range(first, last + 1))


def draw(curves: Sequence[Curve], metric: str, title: str) -> str:
    """The whole SVG document."""
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    x_axis = _step_axis(min(steps), max(steps))
    ticks = nice_ticks(min(values), max(values), 7)
    y_axis = Axis(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP, ticks)
    title, unit = escape(visible(title).replace("\n", " ")), UNITS.get(metric)
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#333333"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {HEIGHT}" role="img" {font}>',
        f"<title>{title}</title>",
        f'<rect {size} rx="8" fill="#ffffff" stroke="#d0d7de"/>',
        f'<text x="{LEFT}" y="29" font-size="16" font-weight="bold">{title}</text>',
        *_grid(x_axis, y_axis),
        _centred((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, "step"),
        _centred(
            0,
            0,
            f"{metric} ({unit})" if unit else metric,
            f"translate(22 {(TOP + HEIGHT - BOTTOM) / 2:g}) rotate(-90)",
        ),
    ]
    for number, curve in enumerate(curves):
        parts.append(_line(curve, number, x_axis, y_axis))
    parts += [*_legend(curves), "</svg>"]
    return "\n".join(parts) + "\n"


def _step_axis(first: int, last: int) -> Axis:
    """From the first step to the last, ticks on whole steps only."""
    low, high = (first, last) if last > first else (first - 1, first + 1)
    ticks = tuple(tick for tick in nice_ticks(low, high, 9) if low <= tick <= high and tick == int(tick))
    return Axis(low, high, LEFT, WIDTH - RIGHT, ticks)


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        parts.append(f'<path d="M{left} {y:.2f}H{right}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4.5:.2f}" text-anchor="end">{_number(tick)}</text>')
    for tick in x_axis.ticks:
        x = x_axis.at(tick)
        parts.append(f'<path d="M{x:.2f} {bottom}v5" stroke="#555555"/>')
        parts.append(_centred(x, bottom + 20, _number(tick)))
    parts.append(f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#555555"/>')
    return parts


def _line(curve: Curve, number: int, x_axis: Axis, y_axis: Axis) -> str:
    points = [(x_axis.at(step), y_axis.at(value)) for step, value in curve.points]
    if len(points) == 1:
        return f'<circle cx="{points[0][0]:.2f}" cy="{points[0][1]:.2f}" r="3.5" fill="{_colour(number)}"/>'
    path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke-linejoin="round" {_stroke(number)}/>'


def _legend(curves: Sequence[Curve]) -> list[str]:
    """A box in the lower right corner of the plot, where a rising curve leaves room."""
    width = 50 + 7.8 * max(len(curve.label) for curve in curves)
    height = 10 + 20 * len(curves)
    x, y = WIDTH - RIGHT - width - 8, HEIGHT - BOTTOM - height - 8
    size = f'width="{width:.2f}" height="{height}"'
    parts = [f'<rect x="{x:.2f}" y="{y}" {size} rx="4" fill="#ffffff" fill-opacity="0.85" stroke="#d0d7de"/>']
    for number, curve in enumerate(curves):
        middle = y + 15 + 20 * number
        parts.append(f'<path d="M{x + 10:.2f} {middle}h24" {_stroke(number)}/>')
        parts.append(f'<text x="{x + 42:.2f}" y="{middle + 4.5}">{escape(curve.label)}</text>')
    return parts


def _centred(x: float, y: float, text: str, transform: str = "") -> str:
    moved = f' transform="{transform}"' if transform else ""
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="middle"{moved}>{escape(text)}</text>'


def _stroke(number: int) -> str:
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    return f'stroke="{_colour(number)}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _number(value: float) -> str:
    """Short, with a true minus sign.

    >>> _number(-2.0), _number(0.25), _number(128000.0)
    ('−2', '0.25', '128,000')
    """
    text = f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:g}"
    return text.replace("-", "−")


if __name__ == "__main__":
    sys.exit(main())
