"""Draw metrics of one or more runs over the steps, as an SVG or a PNG.

  python -m rlmath.cli.plot_run outputs/demo outputs/demo-2 --metric task_reward --output curve.svg
  python -m rlmath.cli.plot_run outputs/first --metric rollout/accuracy --metric validation/accuracy --output curve.png

A metric may be of metrics.jsonl or of validation.jsonl, and need not be in every row. The same numbers give the same
bytes. The picture has a background of its own, for light and dark pages.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Protocol

from PIL import Image, ImageDraw, ImageFont

from rlmath.config.run_files import VALIDATION_FILE
from rlmath.config.terminal import escape_terminal, visible
from rlmath.telemetry.metrics_writer import read_metrics

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 48, 60
"""Margins around the plot. All lengths are in SVG's units; a PNG has PNG_SCALE pixels for each."""

PNG_SCALE = 2
SMOOTHING = 2
"""A PNG is drawn so many times larger, and reduced: Pillow's lines have no smooth edges."""

FONT = "Helvetica, Arial, sans-serif"
TEXT, GRID, FRAME, AXES = "#333333", "#e5e7eb", "#d0d7de", "#555555"

MOST_NEAR = 5
"""Most names that are printed where a metric is not there."""

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
    """(step, value) by rising step, or by another whole number."""


@dataclass(frozen=True)
class Axis:
    """A linear scale from `low` .. `high` onto `start` .. `end`, with its ticks."""

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
    parser = argparse.ArgumentParser(description="Draw metrics of one or more runs over the steps.")
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="folders of runs (run.output_dir)")
    parser.add_argument(
        "--metric",
        action="append",
        help="name in metrics.jsonl or validation.jsonl; may be repeated (default: task_reward)",
    )
    parser.add_argument("--output", required=True, type=Path, help="file to write, .svg or .png")
    parser.add_argument("--title", help="headline (default: the metrics' names)")
    options = parser.parse_args(arguments)
    metrics = list(dict.fromkeys(options.metric or ["task_reward"]))
    try:
        canvas = canvas_for(options.output)
        curves = read_curves(options.run_dirs, metrics)
        draw(canvas, curves, axis_label(metrics), options.title or ", ".join(metrics))
        options.output.parent.mkdir(parents=True, exist_ok=True)
        canvas.write(options.output)
    except (ValueError, OSError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {options.output}")
    return 0


def read_curves(run_dirs: Sequence[str], metrics: Sequence[str]) -> list[Curve]:
    """One for each run and metric; the label names what they differ in."""
    curves = []
    for run_dir, label in zip(run_dirs, _labels(run_dirs), strict=True):
        for metric in metrics:
            named = [label] if len(run_dirs) > 1 or len(metrics) == 1 else []
            named += [visible(metric)] if len(metrics) > 1 else []
            curves.append(read_curve(run_dir, ", ".join(named), metric))
    return curves


def axis_label(metrics: Sequence[str]) -> str:
    """The metric with its unit, or of several their unit where it is one."""
    units = {UNITS.get(metric, "") for metric in metrics}
    unit = units.pop() if len(units) == 1 else ""
    if len(metrics) > 1:
        return unit
    return f"{metrics[0]} ({unit})" if unit else metrics[0]


def _labels(run_dirs: Sequence[str]) -> list[str]:
    """The folders' names, or their paths where two names are the same; of long ones the end."""
    names = [Path(run_dir).resolve().name for run_dir in run_dirs]
    labels = names if len(set(names)) == len(names) else run_dirs
    return [label if len(label) <= 40 else f"…{label[-39:]}" for label in map(visible, labels)]


def read_curve(run_dir: str, label: str, metric: str) -> Curve:
    """Raises ValueError when the run has no finite value of the metric; its text has the names that are near."""
    rows = read_metrics(run_dir)
    if (Path(run_dir) / VALIDATION_FILE).is_file():
        rows += read_metrics(run_dir, VALIDATION_FILE)
    found = sorted((int(row["step"]), row[metric]) for row in rows if metric in row)
    points = [(step, value) for step, value in found if abs(value) <= MOST]
    if found and not points:
        raise ValueError(f"{run_dir} has no finite value of {metric!r}")
    if not points:
        raise ValueError(f"{run_dir} has no metric {metric!r}{_near(metric, rows)}")
    return Curve(label, tuple(points))


def _near(metric: str, rows: Sequence[dict[str, float]]) -> str:
    """Names that are like it, as a whole or in what is behind the last "/"."""
    known = sorted({name for row in rows for name in row} - {"step"})
    ends = {name.rpartition("/")[2] for name in known}
    near = difflib.get_close_matches(metric, known, MOST_NEAR, 0.6)
    near_ends = difflib.get_close_matches(metric.rpartition("/")[2], sorted(ends), MOST_NEAR, 0.6)
    near += [name for end in near_ends for name in known if name.rpartition("/")[2] == end]
    if near:
        return f"; did you mean {', '.join(list(dict.fromkeys(near))[:MOST_NEAR])}?"
    return f"; the names of its {len(known)} metrics are the keys of a row of metrics.jsonl" if known else ""


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


# ---------------------------------------------------------------- what is drawn


def draw(canvas: Canvas, curves: Sequence[Curve], y_label: str, title: str, x_label: str = "step") -> None:
    """The whole picture."""
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    x_axis = _step_axis(min(steps), max(steps))
    ticks = nice_ticks(min(values), max(values), 7)
    y_axis = Axis(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP, ticks)
    canvas.box(0, 0, WIDTH, HEIGHT, 8)
    canvas.text(LEFT, 29, visible(title).replace("\n", " "), size=16)
    _draw_grid(canvas, x_axis, y_axis)
    canvas.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, x_label, "middle")
    canvas.text(22, (TOP + HEIGHT - BOTTOM) / 2, visible(y_label), "middle", upwards=True)
    for number, curve in enumerate(curves):
        points = [(x_axis.at(step), y_axis.at(value)) for step, value in curve.points]
        canvas.curve(points, _colour(number), _dash(number))
    _draw_legend(canvas, curves)


def _step_axis(first: int, last: int) -> Axis:
    """From the first step to the last, ticks on whole steps only."""
    low, high = (first, last) if last > first else (first - 1, first + 1)
    ticks = tuple(tick for tick in nice_ticks(low, high, 9) if low <= tick <= high and tick == int(tick))
    return Axis(low, high, LEFT, WIDTH - RIGHT, ticks)


def _draw_grid(canvas: Canvas, x_axis: Axis, y_axis: Axis) -> None:
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        canvas.line([(left, y), (right, y)], GRID)
        canvas.text(left - 8, y + 4.5, _number(tick), "end")
    for tick in x_axis.ticks:
        x = x_axis.at(tick)
        canvas.line([(x, bottom), (x, bottom + 5)], AXES)
        canvas.text(x, bottom + 20, _number(tick), "middle")
    canvas.line([(left, top), (left, bottom), (right, bottom)], AXES)


def _draw_legend(canvas: Canvas, curves: Sequence[Curve]) -> None:
    """A box in the lower right corner of the plot, where a rising curve leaves room."""
    width = 50 + 7.8 * max(len(curve.label) for curve in curves)
    height = 10 + 20 * len(curves)
    x, y = WIDTH - RIGHT - width - 8, HEIGHT - BOTTOM - height - 8
    canvas.box(x, y, width, height, 4, opacity=0.85)
    for number, curve in enumerate(curves):
        middle = y + 15 + 20 * number
        canvas.line([(x + 10, middle), (x + 34, middle)], _colour(number), 2, _dash(number))
        canvas.text(x + 42, middle + 4.5, curve.label)


def _dash(number: int) -> str:
    return DASHES[number // len(COLOURS) % len(DASHES)]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _number(value: float) -> str:
    """Short, with a true minus sign.

    >>> _number(-2.0), _number(0.25), _number(128000.0)
    ('−2', '0.25', '128,000')
    """
    text = f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:g}"
    return text.replace("-", "−")


# ---------------------------------------------------------------- what it is drawn on


Points = Sequence[tuple[float, float]]


class Canvas(Protocol):
    """Draws in SVG's coordinates: x to the right, y downwards."""

    def box(self, x: float, y: float, width: float, height: float, radius: float, opacity: float = 1) -> None:
        """White, with a thin frame and round corners."""

    def line(self, points: Points, colour: str, width: float = 1, dash: str = "") -> None: ...

    def curve(self, points: Points, colour: str, dash: str) -> None:
        """A line of the plot; one point is a dot."""

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", size: int = 13, upwards: bool = False
    ) -> None:
        """`anchor` (start, middle, end) is what of the text is at x; y is its base line."""

    def write(self, path: Path) -> None: ...


def canvas_for(path: Path) -> Canvas:
    """By the file's ending; ValueError for one that cannot be written."""
    canvases = {".svg": SvgCanvas, ".png": PngCanvas}
    if path.suffix.lower() not in canvases:
        raise ValueError(f'--output is "{path}"; needed: a name that ends in .svg or .png')
    return canvases[path.suffix.lower()]()


class SvgCanvas:
    """SVG, written by hand: the letters stay letters."""

    def __init__(self) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{FONT}" font-size="13" fill="{TEXT}">'
        ]

    def box(self, x: float, y: float, width: float, height: float, radius: float, opacity: float = 1) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
        self._parts.append(f'<rect {place} fill="#ffffff" fill-opacity="{opacity:g}" stroke="{FRAME}"/>')

    def line(self, points: Points, colour: str, width: float = 1, dash: str = "") -> None:
        path = "L".join(f"{x:.2f} {y:.2f}" for x, y in points)
        self._parts.append(f'<path d="M{path}" fill="none" {self._stroke(colour, width, dash)}/>')

    def curve(self, points: Points, colour: str, dash: str) -> None:
        if len(points) == 1:
            (x, y), *_ = points
            self._parts.append(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="3.5" fill="{colour}"/>')
            return
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        stroke = self._stroke(colour, 2, dash)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke-linejoin="round" {stroke}/>')

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", size: int = 13, upwards: bool = False
    ) -> None:
        turned = f' transform="rotate(-90 {x:.2f} {y:.2f})"' if upwards else ""
        bold = f' font-size="{size}" font-weight="bold"' if size > 13 else ""
        place = f'x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}"'
        self._parts.append(f"<text {place}{bold}{turned}>{escape(text)}</text>")

    @staticmethod
    def _stroke(colour: str, width: float, dash: str) -> str:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        return f'stroke="{colour}" stroke-width="{width:g}"{dashes}'

    def write(self, path: Path) -> None:
        path.write_text("\n".join([*self._parts, "</svg>"]) + "\n", encoding="utf-8")


class PngCanvas:
    """Pixels, by Pillow with the font that it brings."""

    _SCALE = PNG_SCALE * SMOOTHING
    _REPLACED = str.maketrans({"−": "-", "…": "..."})
    """Characters that this font lacks."""

    def __init__(self) -> None:
        size = (WIDTH * self._SCALE, HEIGHT * self._SCALE)
        self._image = Image.new("RGBA", size, (255, 255, 255, 0))

    def box(self, x: float, y: float, width: float, height: float, radius: float, opacity: float = 1) -> None:
        layer, pen = self._layer()
        (corner,) = self._scaled([(x, y)])
        (opposite,) = self._scaled([(x + width, y + height)])
        white = (255, 255, 255, round(255 * opacity))
        pen.rounded_rectangle((*corner, *opposite), radius * self._SCALE, white, FRAME, self._SCALE)
        self._image.alpha_composite(layer)

    def line(self, points: Points, colour: str, width: float = 1, dash: str = "") -> None:
        pen = ImageDraw.Draw(self._image)
        for piece in _dashed(points, dash):
            pen.line(self._scaled(piece), colour, round(width * self._SCALE), joint="curve")

    def curve(self, points: Points, colour: str, dash: str) -> None:
        if len(points) > 1:
            self.line(points, colour, 2, dash)
            return
        pen = ImageDraw.Draw(self._image)
        pen.circle(self._scaled(points)[0], 3.5 * self._SCALE, colour)

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", size: int = 13, upwards: bool = False
    ) -> None:
        font = ImageFont.load_default(size * self._SCALE)
        place = {"start": "ls", "middle": "ms", "end": "rs"}[anchor]
        layer, pen = self._layer()
        (at,) = self._scaled([(x, y)])
        pen.text(at, text.translate(self._REPLACED), TEXT, font, place)
        self._image.alpha_composite(layer.rotate(90, center=at) if upwards else layer)

    def _layer(self) -> tuple[Image.Image, ImageDraw.ImageDraw]:
        layer = Image.new("RGBA", self._image.size, (255, 255, 255, 0))
        return layer, ImageDraw.Draw(layer)

    def _scaled(self, points: Points) -> list[tuple[float, float]]:
        return [(x * self._SCALE, y * self._SCALE) for x, y in points]

    def write(self, path: Path) -> None:
        self._image.reduce(SMOOTHING).save(path, format="PNG")


def _dashed(points: Points, dash: str) -> list[list[tuple[float, float]]]:
    """The pieces of a line that are drawn, for dashes as SVG writes them: lengths of a dash and of a gap.

    >>> _dashed([(0, 0), (10, 0), (10, 5)], "7 4")
    [[(0, 0), (7.0, 0.0)], [(10.0, 1.0), (10, 5)]]
    """
    if not dash:
        return [list(points)]
    lengths = [float(length) for length in dash.split()]
    pieces, piece, drawn, left = [], [points[0]], True, lengths[0]
    for (x, y), (next_x, next_y) in itertools.pairwise(points):
        rest = math.hypot(next_x - x, next_y - y)
        while rest > left:
            x, y = x + (next_x - x) * left / rest, y + (next_y - y) * left / rest
            rest -= left
            if drawn:
                pieces.append([*piece, (x, y)])
            drawn = not drawn
            piece, left = [(x, y)], lengths[0 if drawn else 1]
        piece.append((next_x, next_y))
        left -= rest
    return [*pieces, piece] if drawn else pieces


if __name__ == "__main__":
    sys.exit(main())
