import json
from pathlib import Path

import pytest

from rlmath.config.run_files import VALIDATION_FILE
from tools import bench_critic
from tools.bench_critic import Learned, read_learned, report


def write_run(folder: Path) -> Path:
    """Three steps, the critic from the second on: of its samples, all short ones are right and half of the long."""
    (folder / "samples").mkdir(parents=True)
    rows = [{"step": 1, "seconds/step": 9.0}]
    rows += [
        {
            "step": step,
            "seconds/step": 2.0 + step,
            "seconds/validation": 1.0,
            "critic/explained_variance": 0.1 * step,
        }
        for step in (2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / VALIDATION_FILE).write_text('{"step": 3, "validation/accuracy": 0.75}\n')
    groups = [("1+2=", [True, True], 2), ("123456+654321=", [True, False], 6)]
    for step in (1, 2, 3):
        lines = [
            {"prompt": prompt, "completions": [{"correct": one, "length": length} for one in right]}
            for prompt, right, length in groups
        ]
        path = folder / "samples" / f"step-{step:06d}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_is_read_with_what_the_kind_explains_of_its_tokens(tmp_path: Path) -> None:
    found = read_learned(write_run(tmp_path / "run"))
    assert (found.accuracy, found.seconds) == (0.75, 3.5)
    assert found.explained == pytest.approx({2: 0.2, 3: 0.3})
    # 16 tokens, 10 of right answers: 10 (3/8)^2 + 6 (5/8)^2 = 3.75; of the long ones alone 12 / 4 = 3.
    assert found.by_kind == pytest.approx({2: 1 - 3 / 3.75, 3: 1 - 3 / 3.75})


def test_figures_are_means_of_the_same_steps(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(bench_critic, "GROUP", 2)
    runs = [Learned(0.5, 2.0, {1: 0.0, 2: 0.5, 3: 1.0}, {1: 0.5, 2: 0.5, 3: 0.25})]
    runs.append(Learned(1.0, 4.0, {1: 0.5, 2: 1.0, 3: 0.0}, {1: 0.5, 2: 0.5, 3: 0.25}))
    report("critic", runs, [Learned(0.5, 1.5, {}, {})])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["case"], row["metric"], row["value"], row["ratio"]) for row in rows] == [
        ("critic, 2 seeds, steps 1 to 2", "explained_variance", 0.5, 1.0),
        ("critic, 2 seeds, steps 3 to 3", "explained_variance", 0.5, 2.0),
        ("critic, 2 seeds", "accuracy", 0.75, 1.5),
        ("critic, 2 seeds", "step_seconds", 3.0, 0.5),
    ]
    report("grpo", [Learned(0.5, 1.5, {}, {})], [Learned(0.5, 1.5, {}, {})])
    assert "explained" not in capsys.readouterr().out
