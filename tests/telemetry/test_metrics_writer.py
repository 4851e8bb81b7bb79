import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlmath.telemetry.metrics_writer import MetricsWriter, keep_metrics, read_metrics
from tests.disks import files_no_larger_than


def lines(tmp_path):
    return (tmp_path / "metrics.jsonl").read_text().splitlines()


def test_a_line_per_step_with_step_first_and_sorted_keys(tmp_path):
    writer = MetricsWriter(str(tmp_path / "run"), tensorboard=False)
    writer.write(1, {"task_reward": -0.5, "avg_seq_len": 12})
    assert lines(tmp_path / "run") == ['{"step": 1, "avg_seq_len": 12.0, "task_reward": -0.5}']
    writer.write(2, {"task_reward": 1.25})
    writer.close()
    assert lines(tmp_path / "run")[1] == '{"step": 2, "task_reward": 1.25}'


def test_values_that_are_not_finite_stay_json_and_come_back(tmp_path):
    writer = MetricsWriter(str(tmp_path), tensorboard=False)
    writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    writer.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads(lines(tmp_path)[0], parse_constant=refuse)
    assert row == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    (back,) = read_metrics(str(tmp_path))
    assert math.isnan(back["a"])
    assert (back["b"], back["c"]) == (math.inf, -math.inf)


def test_a_resumed_run_goes_on_after_the_last_whole_line_and_replaces_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n{"step": 3, "a"'
    )
    assert [row["a"] for row in read_metrics(str(tmp_path))] == [1.0, 2.0]
    writer = MetricsWriter(str(tmp_path), tensorboard=False)
    writer.write(2, {"a": 20.0})
    writer.close()
    assert len(lines(tmp_path)) == 3
    assert read_metrics(str(tmp_path)) == [{"step": 1.0, "a": 1.0}, {"step": 2.0, "a": 20.0}]


def test_names_that_are_no_longer_written_can_be_read(tmp_path):
    name = "reward/own/\ud800\x1b"
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, name: "Infinity"}) + "\n")
    assert keep_metrics(tmp_path, 5) == 1
    assert read_metrics(str(tmp_path)) == [{"step": 1.0, name: math.inf}]


def test_tensorboard_gets_the_same_numbers(tmp_path):
    writer = MetricsWriter(str(tmp_path), tensorboard=True)
    writer.write(1, {"task_reward": -5.0, "train/entropy_loss": math.nan})
    writer.write(2, {"task_reward": 5.0})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("main/task_reward")] == [
        (1, -5.0),
        (2, 5.0),
    ]
    assert math.isnan(events.Scalars("train/entropy_loss")[0].value)


# ---------------------------------------------------------------- a disk that refuses


def test_rows_wait_for_room_and_are_written_in_order(tmp_path, caplog):
    caplog.set_level("INFO")
    writer = MetricsWriter(str(tmp_path), tensorboard=False)
    writer.write(1, {"a": 0.5})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    with files_no_larger_than(len(whole) + 10):
        for step in (2, 3, 4):
            writer.write(step, {"a": 0.5})
            writer.write_validation(step, {"long": 1.0, "name": 2.0})
            assert (tmp_path / "metrics.jsonl").read_bytes() == whole, "no half line"
        assert writer.lost() == {"metrics.jsonl": 3, "validation.jsonl": 3}
        refusals = [
            message
            for message in caplog.messages
            if message.startswith("metrics.jsonl cannot be written: ")
        ]
        assert len(refusals) == 1 and "File too large" in refusals[0]
    writer.write(5, {"a": 0.5})
    assert [row["step"] for row in read_metrics(str(tmp_path))] == [1, 2, 3, 4, 5]
    assert writer.lost() == {"validation.jsonl": 3}
    writer.close()
    assert [row["step"] for row in read_metrics(str(tmp_path), "validation.jsonl")] == [2, 3, 4]
    assert writer.lost() == {} and "metrics.jsonl can be written again" in caplog.messages


def test_a_run_starts_where_no_file_can_be_made_and_writes_once_it_can(tmp_path):
    folder = tmp_path / "run"
    folder.write_text("in the way")
    writer = MetricsWriter(str(folder), tensorboard=True)
    writer.write(1, {"a": 0.5})
    folder.unlink()
    folder.mkdir()
    writer.write(2, {"a": 0.5})
    writer.close()
    assert [row["step"] for row in read_metrics(str(folder))] == [1, 2]
    assert writer.lost() == {"TensorBoard": 2}


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_that_is_refused_is_off_and_counted(tmp_path, caplog):
    writer = MetricsWriter(str(tmp_path), tensorboard=True)
    writer.write(1, {"a": 0.1})
    with files_no_larger_than(1):
        writer.write(2, {"a": 0.2})
    for step in range(3, 6):
        writer.write(step, {"a": 0.1 * step})
    writer.close()
    assert writer.lost() == {"TensorBoard": 4}
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("metrics.jsonl cannot be written: "), (
        "one warning for a disk that is full"
    )
    assert [row["step"] for row in read_metrics(str(tmp_path))] == [1, 2, 3, 4, 5]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert next(event.step for event in events.Scalars("main/a")) == 1


def test_lines_that_cannot_be_read_are_dropped_when_a_run_resumes(tmp_path, caplog):
    with pytest.raises(ValueError, match="no such file"):
        read_metrics(str(tmp_path))
    path = tmp_path / "metrics.jsonl"
    lines = [
        b'{"step": 1, "a": 1.0}',
        b'{"step": 2, "a"',
        b"\xff\x00",
        b'{"step": 3, "a": "NaN"}',
        b'{"step": 4}',
    ]
    path.write_bytes(b"\n".join([*lines, b'{"step": 5']))
    with pytest.raises(
        ValueError, match=r"line 2: not a line of metrics .* A resumed run drops such lines"
    ):
        read_metrics(str(tmp_path))
    assert keep_metrics(tmp_path, 3) == 2
    assert [row["step"] for row in read_metrics(str(tmp_path))] == [1, 3]
    assert "2 lines cannot be read and are dropped" in caplog.text
