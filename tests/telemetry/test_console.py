from __future__ import annotations

import errno
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlmath.config.run_files import LOG_FILE
from rlmath.distributed.fault_tolerance.exit_codes import SAVED_AND_STOPPED, read_exit_status
from rlmath.telemetry.console import COLUMNS, remaining_seconds, step_line, wrapped
from tests.terminal import on_terminal, shown_lines

THIRD_OF_38 = (3, 38, 1.2344, 70.0)
METRICS = {
    "task_reward": -0.29968,
    "rollout/accuracy": 0.25,
    "rollout/response_length": 7907.8955,
    "avg_seq_len": 8000.5,
    "no_eos_ratio": 0.122802,
    "actor_loss": 1e-6,
}


def test_a_metric_that_is_not_a_number_is_said_and_a_missing_one_left_out():
    assert (
        step_line(*THIRD_OF_38, {"task_reward": math.nan})
        == "step  3/38 reward nan 1.23s left 1:10"
    )


def test_the_line_on_the_console_has_what_matters_first():
    line = "step  3/38 reward -0.300 acc 0.250 len 7908 cut 0.12 1.23s left 1:10"
    assert step_line(*THIRD_OF_38, METRICS) == line


def test_the_line_of_a_run_without_an_accuracy_says_how_many_rewards_are_positive():
    metrics = {
        name.replace("accuracy", "reward_positive"): value for name, value in METRICS.items()
    }
    line = "step  3/38 reward -0.300 pos 0.250 len 7908 cut 0.12 1.23s left 1:10"
    assert step_line(*THIRD_OF_38, metrics) == line


def test_the_line_on_the_console_fits_whatever_the_numbers_are():
    """Metrics are left out before it gets too long.

    The last ones go first, never the time that is left."""
    metrics = METRICS | {
        "task_reward": -12_345.678,
        "train/loss": 123.45678,
        "held_out/loss": 123.45678,
    }
    line = step_line(99_999, 100_000, 86_399.0, 35_999.0, metrics)
    assert len("00:00:00 ") + len(line) <= COLUMNS and "cut" not in line and "len" not in line
    assert line.startswith("step  99999/100000 reward -12345.678 acc 0.250 ") and line.endswith(
        "86399s left 9:59:59"
    )


def test_the_time_that_is_left_is_not_told_before_the_second_step():
    assert remaining_seconds([70.0], 19) is None
    line = step_line(3, 38, 1.2344, None, METRICS)
    assert line == "step  3/38 reward -0.300 acc 0.250 len 7908 cut 0.12 1.23s"
    ends = [70.0, 72.0, 74.0, 86.0, 90.0]
    assert remaining_seconds(ends, 15) == 15 * 5.0, (
        "a validation or a save counts for as often as it comes"
    )


def test_long_lines_are_wrapped_between_words_and_paths_stay_whole():
    path = "/a/very/long/" + "path/" * 20
    text = (
        f"12:00:00 WARNING: The file {path} cannot be read, and the run continues without "
        "it.\n  as it was"
    )
    lines = wrapped(text, 60).split("\n")
    assert f"  {path}" in lines and lines[-1] == "  as it was"
    assert all(len(line) <= 60 for line in lines if path not in line)
    assert " ".join(line.strip() for line in lines) == " ".join(text.split())


LIBRARIES = """
import logging, sys, warnings
from rlmath.telemetry.console import open_log_file, route_library_logs, setup_logging
setup_logging(int(sys.argv[1]))
if sys.argv[1] == "0":  # they have handlers and levels of their own
    import torch, transformers.utils.logging
    transformers.utils.logging.get_logger("transformers")
route_library_logs()
if sys.argv[1] == "0":
    open_log_file(sys.argv[2])
logging.getLogger("rlmath").info("own news")
logging.getLogger("rlmath").warning("own warning")
logging.getLogger("vllm.engine").info("vllm news")
logging.getLogger("vllm.engine").warning("Triton is not there")
logging.getLogger("vllm.engine").error("vllm error")
logging.getLogger("vllm.model_executor.model_loader.reload.inplace").warning("a weight is missing")
logging.getLogger("torch.distributed.elastic").warning("torch warns")
logging.getLogger("transformers.tokenization").warning("transformers warns")
warnings.warn("of a file of the user's")
warnings.warn_explicit("old call", FutureWarning, "/lib/site-packages/vllm/llm.py", 7)
"""
FOR_THE_FILE = (
    "WARNING: vllm.engine: Triton is not there",
    "WARNING: torch.distributed.elastic: torch warns",
    "WARNING: transformers.tokenization: transformers warns",
    "WARNING: py.warnings: /lib/site-packages/vllm/llm.py:7: FutureWarning: old call",
)


def logged(rank: int, folder: Path, **variables: str) -> str:
    # Without what engines of other tests have set in this process.
    base_environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "TRANSFORMERS_"))
    }
    environment = base_environment | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    command = [sys.executable, "-c", LIBRARIES, str(rank), str(folder)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stderr


def test_of_libraries_the_console_has_errors_and_the_log_file_warnings(tmp_path: Path):
    console_lines = [line[9:] for line in logged(0, tmp_path).splitlines()]
    expected_lines = [
        "own news",
        "WARNING: own warning",
        "ERROR: vllm error",
        "WARNING: a weight is missing",
    ]
    assert console_lines == [
        *expected_lines,
        "WARNING: <string>:19: UserWarning: of a file of the user's",
    ]
    lines = (tmp_path / LOG_FILE).read_text().splitlines()
    assert {*FOR_THE_FILE, "WARNING: own warning"} <= {line.partition(" ")[2] for line in lines}
    assert not any("vllm news" in line for line in lines)


def test_who_wants_to_hear_the_libraries_does(tmp_path: Path):
    text = logged(0, tmp_path, VLLM_LOGGING_LEVEL="INFO")
    assert all(message in text for message in ("vllm news", "Triton is not there", "torch warns"))


def test_other_ranks_only_warn_and_say_who_they_are(tmp_path: Path):
    text = logged(3, tmp_path)
    assert "own news" not in text and "Triton" not in text
    assert "rank 3 WARNING: own warning\n" in text


LOGS = """
import logging, sys
from rlmath.telemetry import console
console.setup_logging(0)
log = logging.getLogger("rlmath.somewhere")
log.info("before there is a file")
console.open_log_file(sys.argv[1])
log.debug("for the file \x1b[31malone")
logging.getLogger("another").debug("of a library")
log.info("news of many words " * 8)
"""


def write_logs(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOGS, str(folder)]
    return subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)


def test_the_log_file_has_all_lines_with_date_and_level_and_no_control_characters(tmp_path: Path):
    for _ in range(2):
        process = write_logs(tmp_path)
    assert "before there is a file" in process.stderr and "alone" not in process.stderr
    assert f"news of many words {'news of many words ' * 7}\n" in process.stderr, (
        "no line of a log is wrapped"
    )
    lines = (tmp_path / LOG_FILE).read_text().splitlines()
    assert [
        re.sub(r"^\d{8}-\d\d:\d\d:\d\d\.\d{3} ", "", line)[:30].rstrip() for line in lines
    ] == 2 * [
        "INFO: before there is a file",
        r"DEBUG: for the file \x1b[31malone"[:30],
        "INFO: news of many words news o"[:30].rstrip(),
    ]


def test_a_log_file_that_the_disk_refuses_is_told_once(tmp_path: Path):
    """Whatever is written to /dev/full is refused."""
    (tmp_path / LOG_FILE).symlink_to("/dev/full")
    process = write_logs(tmp_path)
    assert (
        process.stderr.count(os.strerror(errno.ENOSPC)) == 1 and "Traceback" not in process.stderr
    )
    assert (
        process.stderr.count("before there is a file") == 1
        and "news of many words" in process.stderr
    )


BAR_AND_LINES = """
import logging, sys
from tqdm import tqdm
from rlmath.telemetry.console import setup_logging
setup_logging(0)
with tqdm(total=10, desc="step 4/20", leave=False, mininterval=0) as bar:
    for n in range(10):
        bar.update()
        if n == 5:
            logging.getLogger("rlmath").warning("a warning of many words " * 6)
logging.getLogger("rlmath").info("the end")
"""


@pytest.mark.parametrize("columns", [80, 50])
def test_lines_on_a_terminal_fit_and_do_not_mix_with_a_bar(columns: int):
    terminal_text = on_terminal(BAR_AND_LINES, columns)
    assert "step 4/20:" in terminal_text and "\x1b" not in terminal_text
    lines = [line for line in shown_lines(terminal_text) if line]
    assert all(len(line) <= columns for line in lines)
    assert (
        " ".join(line.strip() for line in lines[:-1])[9:]
        == f"WARNING: {'a warning of many words ' * 6}".rstrip()
    )
    assert lines[-1].endswith("the end") and len(lines) > 2


LINE_OVER_A_BAR = """
import logging, sys
from rlmath.telemetry.console import setup_logging
setup_logging(1)
sys.__stdout__.write("step 4/20:  50%|" + 50 * "#" + "|")
sys.__stdout__.flush()
logging.getLogger("rlmath").warning("a warning")
"""


def test_the_line_of_another_rank_takes_the_place_of_the_bar_of_the_first():
    line, end = shown_lines(on_terminal(LINE_OVER_A_BAR, 80))
    assert re.fullmatch(r"\d\d:\d\d:\d\d rank 1 WARNING: a warning", line) and end == ""


BAR_OF_AN_EVALUATION = """
import os, sys, time
from pathlib import Path
from tqdm import tqdm
from rlmath.run.command_line import set_up_rank_logging
set_up_rank_logging()
bar = tqdm(total=10, desc="evaluation", leave=False)
"""


def test_no_bar_is_drawn_below_the_last_line_of_an_evaluation_that_is_interrupted(tmp_path: Path):
    program = f"""{BAR_OF_AN_EVALUATION}
from rlmath.evals.command import stop_on_signal
stop_on_signal(Path({str(tmp_path)!r}))
os.kill(os.getpid(), 2)
time.sleep(60)
"""
    before, separator, after = on_terminal(program, 80, 75).partition("the same")
    assert "evaluation:" in before and separator and "evaluation:" not in after
    exit_status = read_exit_status(tmp_path)
    assert exit_status.status == SAVED_AND_STOPPED
    assert exit_status.message == "stopped by SIGINT (Ctrl-C): the same command resumes"


def test_a_terminal_that_does_not_know_its_columns_has_80() -> None:
    program = """
import logging
from tqdm import tqdm
from rlmath.telemetry.console import setup_logging
setup_logging(0)
bar = tqdm(total=10, desc="evaluation", leave=False)
bar.update(5)
logging.getLogger("rlmath").info("word " * 30)
bar.close()
"""
    lines = [line for line in shown_lines(on_terminal(program, 0)) if "word" in line]
    assert len(lines) == 3 and 70 < len(lines[0]) <= 80


def test_no_bar_is_drawn_below_an_error_and_one_that_another_rank_s_end_causes_is_for_the_log_file_alone(
    tmp_path: Path,
) -> None:
    program = f"""{BAR_OF_AN_EVALUATION}
import logging
from rlmath.distributed.fault_tolerance.failure import PeerFailedError
from rlmath.run.startup import end_broken
from rlmath.telemetry.console import open_log_file
if os.fork() == 0:
    try:
        raise OSError("broken")
    except OSError:
        end_broken()
assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
bar.close()
print("the second")
open_log_file({str(tmp_path)!r})
logging.getLogger("rlmath").error("rank 0 ends: rank 1 has died")
try:
    try:
        raise RuntimeError("Read error: Connection reset by peer")
    except RuntimeError as error:
        raise PeerFailedError("rank 1 has died") from error
except PeerFailedError:
    end_broken()
"""
    first, _, second = on_terminal(program, 80, 1).partition("the second\r\n")
    before, separator, after = first.partition("OSError: broken")
    assert "evaluation:" in before and separator and "evaluation:" not in after
    lines = second.splitlines()
    assert lines[-1].endswith("ERROR: rank 0 ends: rank 1 has died") and len(lines) == 1
    log = (tmp_path / "run.log").read_text()
    assert (
        "RuntimeError: Read error: Connection reset by peer" in log
        and "PeerFailedError: rank 1" in log
    )


def test_several_rewards_are_in_the_lines_of_a_step() -> None:
    metrics = {
        "task_reward": 1.5,
        "reward/steps": 0.25,
        "reward/steps/failures": 0.0,
        "reward/boxed": 1.0,
    }
    assert step_line(*THIRD_OF_38, metrics) == "step  3/38 reward 1.500 steps 0.25 1.23s left 1:10"
