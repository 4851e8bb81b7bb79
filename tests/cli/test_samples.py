import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlmath.algorithms.types import Completion, Prompt, RewardFailure, Score, ScoredGroup
from rlmath.cli.samples import main
from rlmath.config.load import load_config, save_config
from rlmath.telemetry.samples import SampleWriter

RIGHT = Score(5.0, True, "132", "string")
WRONG = Score(-5.0, False, "13\x1b[2J", "symbolic")


def write_step(run_dir: Path, step: int, **scores_by_id: list[Score]) -> None:
    groups = [
        ScoredGroup(
            Prompt(prompt_id, "47+85=\nanswer:", (1,), ("\\boxed{132}",), "math"),
            tuple(
                Completion(index, (2, 3), (-0.1, -0.1), "one\x1b]0;owned\x07\rtwo", "stop", 0)
                for index in range(len(scores))
            ),
            tuple(scores),
        )
        for prompt_id, scores in scores_by_id.items()
    ]
    SampleWriter(str(run_dir), 9).write(
        step, groups, [[0.5] * len(group.scores) for group in groups]
    )


@pytest.fixture
def run_dir(tmp_path):
    write_step(tmp_path, 1, early=[WRONG])
    write_step(tmp_path, 12, good=[RIGHT, RIGHT], bad=[WRONG, WRONG], half=[RIGHT, WRONG])
    return str(tmp_path)


def shown(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_last_step_is_shown_whole(run_dir, capsys):
    text = shown(capsys, run_dir)
    assert [line for line in text.splitlines() if line.startswith("=====")] == [
        "===== step-000012  good  2 of 2 right",
        "===== step-000012  bad  0 of 2 right",
        "===== step-000012  half  1 of 2 right",
    ]
    first = text.splitlines()[:7]
    assert first[1:] == [
        "prompt    | 47+85=",
        "          | answer:",
        "solutions | \\boxed{132}",
        "--- 1: reward +5, advantage +0.500, right (string), 2 tokens, stop",
        "answer    | 132",
        "          | one\\x1b]0;owned\\x07\\x0dtwo",
    ]


def test_of_a_function_of_ones_own_the_answer_of_the_text_is_shown_if_it_has_one(tmp_path, capsys):
    write_step(
        tmp_path,
        1,
        own=[Score(0.5, True, "", "function")],
        judged=[Score(-1.0, False, "", "no_answer")],
    )
    path = tmp_path / "samples" / "step-000001.jsonl"
    own_line, judged_line = path.read_text().splitlines()
    boxed = own_line.replace("two", "two \\\\boxed{7}")
    path.write_text("\n".join([own_line, boxed, judged_line]) + "\n")
    groups = shown(capsys, str(tmp_path)).split("=====")[1:]
    answers = [
        [line for line in group.splitlines() if line.startswith("answer")] for group in groups
    ]
    assert answers == [[], ["answer    | 7"], ["answer    | (none)"]]
    assert all("          | one" in group for group in groups)


def test_a_step_and_a_number_of_groups_can_be_chosen(run_dir, capsys):
    assert "early" in shown(capsys, run_dir, "--step", "1")
    text = shown(capsys, run_dir, "--step", "12", "--groups", "1")
    assert text.count("=====") == 1


@pytest.mark.parametrize(
    ("kind", "prompt_id"), [("right", "good"), ("wrong", "bad"), ("mixed", "half")]
)
def test_only_one_kind_of_group(run_dir, capsys, kind, prompt_id):
    text = shown(capsys, run_dir, "--only", kind)
    assert text.count("=====") == 1
    assert f"step-000012  {prompt_id} " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "5"], "has no step 5; it has 2 steps, 1 to 12"),
        (["--step", "1", "--only", "mixed"], "has no group of kind 'mixed'"),
    ],
)
def test_what_is_not_there_is_said(run_dir, capsys, arguments, message):
    assert main([run_dir, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_where_there_is_nothing_to_show_the_cause_is_said(tmp_path, capsys):
    def told(folder: Path) -> str:
        assert main([str(folder)]) == 2
        output, errors = capsys.readouterr()
        assert output == "" and errors.startswith("rlmath samples: ")
        return errors

    run = tmp_path / "first"
    run.mkdir()
    assert f'got "{tmp_path / "frist"}", which is not there; needed: ' in told(tmp_path / "frist")
    assert f'There is "{run}"' in told(tmp_path / "frist")
    assert told(run).endswith(
        "which has no config.yaml; needed: the folder of a run (run.output_dir).\n"
    )
    settings = ["run.output_dir=o", "model.path=m", "data.train_path=t"]
    save_config(load_config([], settings), run / "config.yaml")
    assert "has no samples yet: no GRPO step is done" in told(run)
    (run / "samples").mkdir()
    assert "has no samples yet" in told(run)
    save_config(
        load_config([], [*settings, "telemetry.sample_groups_per_step=0"]), run / "config.yaml"
    )
    assert "keeps no samples: its telemetry.sample_groups_per_step is 0." in told(run)


ROW = (
    '{"prompt_id": "a", "prompt": "p", "solutions": ["s"], "completions": [{"reward": 1, '
    '"advantage": 0, '
    '"correct": true, "verdict": "string", "extracted": "1", "length": 5, "finish_reason": '
    '"stop", "text": "t"}]}'
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "line 1: not a row of samples (ValueError: it is nested"),
        (ROW.replace('"t"', "5").encode(), "line 1: not a row of samples (TypeError"),
    ],
    ids=["too deep", "text of a number"],
)
def test_a_file_that_is_none_of_samples_is_named(tmp_path, capsys, content, message):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step-000001.jsonl").write_bytes(content)
    assert main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_only_files_are_samples(tmp_path, capsys):
    samples = tmp_path / "samples"
    (samples / "step-000003.jsonl").mkdir(parents=True)
    os.mkfifo(samples / "step-000004.jsonl")
    (samples / "step-000005.jsonl").symlink_to("/dev/zero")
    (samples / "step-٠٠٠٠٠٦.jsonl").write_text(ROW)
    assert main([str(tmp_path)]) == 2
    assert "needed: the folder of a run" in capsys.readouterr().err
    (samples / "step-000002.jsonl").write_text(ROW)
    assert main([str(tmp_path)]) == 0
    assert "step-000002  a  1 of 1 right" in capsys.readouterr().out


def test_as_a_program_into_a_closed_pipe(run_dir):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = str(Path(__file__).parents[2] / "rlmath" / "cli" / "samples.py")
    command = [sys.executable, program, run_dir]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_several_rewards_are_shown_one_by_one_with_what_failed(tmp_path, capsys):
    failure = RewardFailure("own", "error", "KeyError: '\x1b[2J'\n  File mine.py")
    score = Score(1.0, True, "132", "string", parts=(1.0, None), failures=(failure,))
    completions = (Completion(0, (2,), (-0.1,), "x", "stop", 0),)
    scored = ScoredGroup(Prompt("q", "?", (1,), ("132",), "math"), completions, (score,))
    SampleWriter(str(tmp_path), 1, ["correctness", "own"]).write(1, [scored], [[0.5]])
    text = shown(capsys, str(tmp_path))
    assert "--- 1: reward +1 (correctness +1, own failed), advantage +0.500, right (string)" in text
    assert "failed    | own: error: KeyError: '\\x1b[2J'\n          |   File mine.py" in text
