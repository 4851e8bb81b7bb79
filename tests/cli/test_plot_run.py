import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image, ImageColor

from rlmath.cli.plot_run import COLOURS, Axis, main, nice_ticks
from rlmath.telemetry.metrics_writer import MetricsWriter

SVG = "{http://www.w3.org/2000/svg}"


def write_run(folder: Path, values, first_step=1, metric="task_reward") -> str:
    writer = MetricsWriter(str(folder), tensorboard=False)
    for step, value in enumerate(values, start=first_step):
        writer.write(step, {metric: value})
    writer.close()
    return str(folder)


def write_metrics(folder: Path, step: int, metrics: dict[str, float], validation: bool = False) -> None:
    writer = MetricsWriter(str(folder), tensorboard=False)
    (writer.write_validation if validation else writer.write)(step, metrics)
    writer.close()


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


def test_the_file_that_was_written_is_named(tmp_path, capsys):
    picture = tmp_path / "new" / "picture.svg"
    assert main([write_run(tmp_path / "run", [1.0, 2.0]), "--output", str(picture)]) == 0
    assert picture.is_file() and capsys.readouterr().out == f"Wrote {picture}\n"


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


def test_the_error_of_an_unknown_name_has_only_those_that_are_near(tmp_path, capsys):
    run = write_run(tmp_path / "run", [1.0])
    write_metrics(tmp_path / "run", 2, {"rollout/accuracy": 1.0, "seconds/update": 2.0, "loss": float("nan")})
    output = ["--output", str(tmp_path / "x.svg")]
    for wrong, near in {
        "reward": "task_reward",
        "acuracy": "rollout/accuracy, validation/accuracy",
        "val/accuracy": "validation/accuracy, rollout/accuracy",
    }.items():
        write_metrics(tmp_path / "run", 2, {"validation/accuracy": 0.5}, validation=True)
        assert main([run, "--metric", wrong, *output]) == 1
        assert capsys.readouterr().err == f"plot_run: {run} has no metric {wrong!r}; did you mean {near}?\n"
    assert main([run, "--metric", "zzzz", *output]) == 1
    assert "has no metric 'zzzz'; the names of its 5 metrics are the keys" in capsys.readouterr().err
    assert main([run, "--metric", "loss", *output]) == 1
    assert capsys.readouterr().err == f"plot_run: {run} has no finite value of 'loss'\n"
    assert main([str(tmp_path / "none"), *output]) == 1
    assert "no such file" in capsys.readouterr().err


def test_validations_and_metrics_of_some_rows_only_are_drawn(tmp_path):
    run = write_run(tmp_path / "run", [1.0] * 4)
    write_metrics(tmp_path / "run", 5, {"now_and_then": 3.0})
    write_metrics(tmp_path / "run", 7, {"now_and_then": 4.0})
    for step in (0, 5, 10):
        write_metrics(tmp_path / "run", step, {"validation/accuracy": step / 10}, validation=True)
    (line,) = draw(tmp_path, run, "--metric", "now_and_then").iter(f"{SVG}polyline")
    assert [point.split(",")[0] for point in line.get("points").split()] == ["76.00", "736.00"]
    (line,) = draw(tmp_path, run, "--metric", "validation/accuracy").iter(f"{SVG}polyline")
    assert line.get("points") == "76.00,360.00 406.00,204.00 736.00,48.00"


def test_every_metric_that_is_given_is_drawn_for_every_run(tmp_path):
    runs = [write_run(tmp_path / name, [0.0, 1.0]) for name in ("one", "two")]
    for folder in runs:
        write_metrics(Path(folder), 3, {"final_reward": 0.5})
    metrics = ("--metric", "task_reward", "--metric", "final_reward")
    picture = draw(tmp_path, runs[0], *metrics)
    assert len([*picture.iter(f"{SVG}polyline"), *picture.iter(f"{SVG}circle")]) == 2
    assert texts(picture)[0] == "task_reward, final_reward"
    assert texts(picture)[-2:] == ["task_reward", "final_reward"]
    assert texts(draw(tmp_path, *runs, *metrics))[-4:] == [
        f"{run}, {metric}" for run in ("one", "two") for metric in ("task_reward", "final_reward")
    ]


def test_a_png_is_one_with_the_curves_where_the_svg_has_them(tmp_path):
    output = tmp_path / "curve.png"
    assert main([write_run(tmp_path / "run", [-4.0, 0.0, 4.0]), "--output", str(output)]) == 0
    with Image.open(output) as picture:
        assert (picture.format, picture.size) == ("PNG", (2 * 760, 2 * 420))
        blue = (0x00, 0x72, 0xB2, 255)
        for x, y in ((76, 360), (241, 282), (406, 204), (571, 126), (736, 48)):
            near = [picture.getpixel((2 * x + i, 2 * y + j)) for i in range(-3, 4) for j in range(-3, 4)]
            assert blue in near
        assert picture.getpixel((2 * 406, 2 * 300)) == (255, 255, 255, 255)
        assert picture.getpixel((2 * 76, 2 * 100)) != (255, 255, 255, 255), "the axis"


def test_eight_curves_of_a_png_differ_and_one_point_is_a_dot(tmp_path):
    runs = [write_run(tmp_path / f"r{i}", [float(i), float(i)]) for i in range(8)]
    runs.append(write_run(tmp_path / "dot", [9.0]))
    output = tmp_path / "curve.png"
    assert main([*runs, "--output", str(output)]) == 0
    with Image.open(output) as picture:
        colours = {colour for _, colour in picture.getcolors(10**6)}
        # Above the legend, half way along: the eighth run's line, at 7 of 0 to 9, has gaps, the others have none.
        heights = [round(2 * (360 - i / 10 * 312)) for i in range(8)]
        along = [[picture.getpixel((x, y)) for x in range(300, 500)] for y in (heights[6], heights[7])]
    assert {(*ImageColor.getrgb(colour), 255) for colour in COLOURS} <= colours
    assert len(set(along[0])) < len(set(along[1]))


@pytest.mark.parametrize("name", ["curve.jpg", "curve", "curve.svg.gz"])
def test_a_format_that_cannot_be_written_is_refused(tmp_path, capsys, name):
    assert main([write_run(tmp_path / "run", [1.0]), "--output", str(tmp_path / name)]) == 1
    assert "needed: a name that ends in .svg or .png" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


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
