import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from rlmath.trainer.telemetry.metrics_writer import MetricsWriter
from tools.plot_run import Axis, main, nice_ticks

SVG = "{http://www.w3.org/2000/svg}"


def write_run(folder: Path, values, first_step=1, metric="task_reward") -> str:
    writer = MetricsWriter(str(folder), tensorboard=False)
    for step, value in enumerate(values, start=first_step):
        writer.write(step, {metric: value})
    writer.close()
    return str(folder)


def draw(tmp_path, *arguments) -> ET.Element:
    output = tmp_path / "pictures" / "curve.svg"
    assert main([*arguments, "--output", str(output)]) == 0
    return ET.fromstring(output.read_text(encoding="utf-8"))


def texts(picture) -> list[str]:
    return [element.text for element in picture.iter(f"{SVG}text")]


def test_points_lie_where_axes_and_ticks_say(tmp_path):
    picture = draw(tmp_path, write_run(tmp_path / "run", [-4.0, 0.0, 4.0]))
    (line,) = picture.iter(f"{SVG}polyline")
    # plot area: x 76 to 736, y 360 (bottom, -4) to 48 (top, 4)
    assert line.get("points") == "76.00,360.00 406.00,204.00 736.00,48.00"
    assert {"−4", "−2", "0", "2", "4", "1", "3", "step"} <= set(texts(picture))


def test_title_unit_and_a_legend_of_every_run(tmp_path):
    runs = [write_run(tmp_path / f"seed-{seed}", [0.0, seed]) for seed in (1, 2, 3)]
    picture = draw(tmp_path, *runs, "--title", "Three <seeds> & a title")
    assert "Three <seeds> & a title" in texts(picture)
    assert "task_reward (mean reward of a completion)" in texts(picture)
    assert [text for text in texts(picture) if text.startswith("seed-")] == ["seed-1", "seed-2", "seed-3"]
    assert len({line.get("stroke") for line in picture.iter(f"{SVG}polyline")}) == 3


def test_runs_of_the_same_name_are_told_apart_by_path(tmp_path):
    runs = [write_run(tmp_path / parent / "r", [1.0, 2.0]) for parent in ("a", "b")]
    labels = [text for text in texts(draw(tmp_path, *runs)) if text.endswith("/r")]
    assert len(set(labels)) == 2


def test_the_picture_has_its_own_background(tmp_path):
    picture = draw(tmp_path, write_run(tmp_path / "run", [1.0, 2.0]))
    background = next(picture.iter(f"{SVG}rect"))
    assert (background.get("width"), background.get("height")) == (
        picture.get("width"),
        picture.get("height"),
    )
    assert background.get("fill") == "#ffffff"


def test_the_same_numbers_give_the_same_bytes(tmp_path):
    run = write_run(tmp_path / "run", [0.1, 0.3, 0.2])
    for name in ("one.svg", "two.svg"):
        assert main([run, "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_values_that_are_not_finite_are_left_out(tmp_path):
    picture = draw(
        tmp_path, write_run(tmp_path / "run", [1.0, float("nan"), float("inf"), 1e308, -1e308, 2.0])
    )
    (line,) = picture.iter(f"{SVG}polyline")
    assert len(line.get("points").split()) == 2


def test_one_step_is_a_dot_and_a_constant_run_a_line(tmp_path):
    assert len(list(draw(tmp_path, write_run(tmp_path / "one", [5.0])).iter(f"{SVG}circle"))) == 1
    (line,) = draw(tmp_path, write_run(tmp_path / "flat", [5.0, 5.0])).iter(f"{SVG}polyline")
    assert line.get("points") == "76.00,204.00 736.00,204.00"


def test_an_unknown_metric_names_those_there_are(tmp_path, capsys):
    run = write_run(tmp_path / "run", [1.0])
    assert main([run, "--metric", "reward", "--output", str(tmp_path / "x.svg")]) == 1
    assert "has no finite value of 'reward'; it has task_reward" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), "--output", str(tmp_path / "x.svg")]) == 1
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (-5.0, 4.7, (-6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0)),
        (0.0, 0.3, (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)),
        (5.0, 5.0, (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)),
        (1e-9, 3e-9, (1e-9, 1.5e-9, 2e-9, 2.5e-9, 3e-9)),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low, high, ticks):
    assert nice_ticks(low, high, 7) == ticks


def test_an_axis_is_linear():
    axis = Axis(-4.0, 4.0, 360.0, 48.0, ())
    assert (axis.at(-4.0), axis.at(0.0), axis.at(2.0)) == (360.0, 204.0, 126.0)
