import os
import subprocess
import sys

from rlmath.trainer.telemetry.console import Progress, step_line

THIRD_OF_38 = Progress(
    epoch=1,
    total_epochs=2,
    step=3,
    steps_per_epoch=19,
    global_step=3,
    total_steps=38,
    step_seconds=1.2344,
    total_seconds=6.0,
    steps_timed=3,
)


def test_the_step_line_has_the_fields_of_the_areal_documents():
    metrics = {
        "task_reward": -0.29968,
        "avg_seq_len": 7907.8955,
        "no_eos_ratio": 0.122802,
        "actor_loss": 1e-6,
    }
    assert step_line(THIRD_OF_38, metrics) == (
        "Epoch 1/2 step 3/19 (global step 3) finishes. #End to end# execution time: *1.234*s. "
        "Total time consumption: 6.000s. Estimated remaining time: 70.000s. "
        "task_reward: -0.2997 avg_seq_len: 7907.9 no_eos_ratio: 0.1228"
    )


def test_a_metric_that_is_not_a_number_is_said_and_a_missing_one_left_out():
    line = step_line(THIRD_OF_38, {"task_reward": float("nan")})
    assert line.endswith("task_reward: nan")


def test_a_resumed_run_estimates_from_its_own_steps():
    resumed = Progress(2, 2, 10, 19, 29, 38, 2.0, 8.0, steps_timed=4)
    assert resumed.remaining_seconds == 9 * 8.0 / 4


def logged(rank: int) -> str:
    code = (
        f"import logging; from rlmath.trainer.telemetry.console import setup_logging; setup_logging({rank});"
        "logging.getLogger('rlmath').info('own news'); logging.getLogger('rlmath').warning('own warning');"
        "logging.getLogger('vllm.engine').info('vllm news'); logging.getLogger('megatron.core').info('mc news');"
        "logging.getLogger('vllm.engine').error('vllm error')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_rank_0_tells_its_news_and_libraries_only_warn():
    text = logged(0)
    assert "INFO: own news\n" in text
    assert "WARNING: own warning\n" in text
    assert "ERROR: vllm error\n" in text
    assert "vllm news" not in text
    assert "mc news" not in text


def test_other_ranks_only_warn_and_say_who_they_are():
    text = logged(3)
    assert "own news" not in text
    assert "rank 3 WARNING: own warning\n" in text
