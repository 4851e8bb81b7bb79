"""A reward function of yours, on a random model: the more digits in a completion, the better.

    python docs/examples/custom_reward.py

It trains for 8 steps on this machine's CPU and prints the mean reward of each.
"""

from pathlib import Path

from rlmath import load_config, train
from rlmath.cli import make_arithmetic, make_tiny_model

FOLDER = Path("outputs/examples/custom_reward")


def digits(completion: str, solutions: list[str], row: dict) -> tuple[float, dict[str, float]]:
    """Share of digits, and metrics, which the run logs as reward/own/<name>."""
    count = sum(character.isdecimal() for character in completion)
    return count / max(1, len(completion)), {"digits": count}


def main() -> None:
    if not FOLDER.exists():
        make_arithmetic.main(f"--output {FOLDER}/data --train 200 --heldout 20 --worked 20".split())
        make_tiny_model.main(["--output", f"{FOLDER}/model"])
    config = load_config(
        "configs/demo.yaml",
        run={"output_dir": FOLDER / "run", "total_steps": 8},
        model={"path": FOLDER / "model"},
        data={"train_path": FOLDER / "data" / "train.jsonl", "prompts_per_step": 16},
        parallel={"tensor": 1},
        optimizer={"lr": 1e-3, "warmup_steps": 0, "decay": "constant"},
        reward={"function": f"{__file__}:digits"},
        algorithm={"n_minibatches": 1},
        telemetry={"warn_truncated": 1},  # a random model seldom ends by itself
    )
    run = train(config, ranks=2)
    for row in run.metrics():
        print(
            f"step {row['step']:.0f}: {row['task_reward']:.3f}, {row['reward/own/digits']:.1f} "
            "digits"
        )


if __name__ == "__main__":
    main()
