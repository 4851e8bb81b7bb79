import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlmath.trainer.telemetry.metrics_writer import MetricsWriter, read_metrics


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
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n{"step": 3, "a"')
    assert [row["a"] for row in read_metrics(str(tmp_path))] == [1.0, 2.0]
    writer = MetricsWriter(str(tmp_path), tensorboard=False)
    writer.write(2, {"a": 20.0})
    writer.close()
    assert len(lines(tmp_path)) == 3
    assert read_metrics(str(tmp_path)) == [{"step": 1.0, "a": 1.0}, {"step": 2.0, "a": 20.0}]


def test_reading_names_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_metrics(str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"a": 1.0}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_metrics(str(tmp_path))


def test_tensorboard_gets_the_same_numbers_and_texts(tmp_path):
    writer = MetricsWriter(str(tmp_path), tensorboard=True)
    writer.write(1, {"task_reward": -5.0, "train/entropy_loss": math.nan})
    writer.write(2, {"task_reward": 5.0})
    writer.write_text("samples/group_1", "**Prompt**", 2)
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("main/task_reward")] == [
        (1, -5.0),
        (2, 5.0),
    ]
    assert math.isnan(events.Scalars("train/entropy_loss")[0].value)
    (text,) = events.Tensors("samples/group_1/text_summary")
    assert (text.step, text.tensor_proto.string_val[0]) == (2, b"**Prompt**")


def test_without_tensorboard_texts_are_dropped_and_no_folder_is_made(tmp_path):
    writer = MetricsWriter(str(tmp_path), tensorboard=False)
    writer.write_text("tag", "text", 1)
    writer.close()
    assert not (tmp_path / "tensorboard").exists()
