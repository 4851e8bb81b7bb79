"""Supervised training on worked solutions, then GRPO from its model.

    python docs/examples/sft_then_grpo.py

Prints the loss of the first and the accuracy of the second.
"""

from pathlib import Path

from rlmath import load_config, train
from rlmath.cli import make_arithmetic, make_tiny_model

FOLDER = Path("outputs/examples/sft_then_grpo")


def main() -> None:
    if not FOLDER.exists():
        make_arithmetic.main(f"--output {FOLDER}/data --train 1000 --heldout 100 --worked 8000".split())
        make_tiny_model.main(["--output", f"{FOLDER}/model"])
    supervised = load_config(
        "configs/demo_sft.yaml",
        run={"output_dir": FOLDER / "sft", "total_epochs": 2},
        model={"path": FOLDER / "model"},
        data={"train_path": FOLDER / "data" / "worked.jsonl"},
        sft={"held_out_path": FOLDER / "data" / "worked_heldout.jsonl"},
    )
    first = train(supervised, ranks=2, program="sft")
    config = load_config(
        "configs/demo.yaml",
        run={"output_dir": FOLDER / "grpo", "total_steps": 10},
        model={"path": first.model},
        data={"train_path": FOLDER / "data" / "train.jsonl"},
        optimizer={"warmup_steps": 2},
    )
    second = train(config, ranks=2)
    losses = [row["train/loss"] for row in first.metrics() if "train/loss" in row]
    print(f"supervised training: loss {losses[0]:.2f} to {losses[-1]:.2f}")
    rows = second.metrics()
    print(
        f"GRPO: {rows[0]['rollout/accuracy']:.1%} right in step 1, {rows[-1]['rollout/accuracy']:.1%} in step 10"
    )


if __name__ == "__main__":
    main()
