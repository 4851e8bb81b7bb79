"""Two rewards with weights, each normalised in its own group (GDPO): right answers, and short ones.

    python docs/examples/two_rewards.py

A random model is never right, so that only the second teaches: completions become shorter.
"""

from pathlib import Path

from rlmath import load_config, train
from rlmath.cli import make_arithmetic, make_tiny_model

FOLDER = Path("outputs/examples/two_rewards")


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
        reward={"rewards": ["correctness", "length"], "weights": [1.0, 0.5], "combine": "gdpo"},
        algorithm={"n_minibatches": 1},
        telemetry={"warn_truncated": 1},  # a random model seldom ends by itself
    )
    run = train(config, ranks=2)
    for row in run.metrics():
        print(
            f"step {row['step']:.0f}: correctness {row['reward/correctness']:.2f}, "
            f"{row['avg_seq_len']:.1f} tokens"
        )


if __name__ == "__main__":
    main()
