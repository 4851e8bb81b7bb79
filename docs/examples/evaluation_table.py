"""Accuracy of two models on the same problems, side by side.

One is random, the other learned from worked solutions.

python docs/examples/evaluation_table.py
"""

import subprocess
import sys
from pathlib import Path

from rlmath import load_config, train
from rlmath.cli import make_arithmetic, make_tiny_model

FOLDER = Path("outputs/examples/evaluation_table")


def evaluate(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "rlmath.cli.main", "eval", *arguments], check=True)


def main() -> None:
    if not FOLDER.exists():
        make_arithmetic.main(
            f"--output {FOLDER}/data --train 100 --heldout 100 --worked 8000".split()
        )
        make_tiny_model.main(["--output", f"{FOLDER}/random"])
    supervised = load_config(
        "configs/demo_sft.yaml",
        run={"output_dir": FOLDER / "sft"},
        model={"path": FOLDER / "random"},
        data={"train_path": FOLDER / "data" / "worked.jsonl"},
        sft={"held_out_path": FOLDER / "data" / "worked_heldout.jsonl"},
    )
    taught = train(supervised, ranks=2, program="sft").model
    lengths = ["--max-prompt-tokens", "32", "--max-new-tokens", "32", "--samples", "4"]
    for name, model in (("random", FOLDER / "random"), ("taught", taught)):
        where = [
            "--model",
            str(model),
            "--data-dir",
            f"{FOLDER}/data",
            "--output",
            f"{FOLDER}/eval-{name}",
        ]
        evaluate(*where, "--benchmarks", "heldout", *lengths)
    evaluate("--compare", f"{FOLDER}/eval-random", f"{FOLDER}/eval-taught")


if __name__ == "__main__":
    main()
