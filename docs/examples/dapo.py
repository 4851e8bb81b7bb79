"""Dry run of the DAPO recipe (configs/algorithms/dapo.yaml) on top of a config of yours.

    python docs/examples/dapo.py

The recipe needs a model and data, which are made here as in two_rewards.py. The dry run checks
everything and prints the plan; without --dry-run the same command trains.
"""

import subprocess
import sys
from pathlib import Path

from rlmath.cli import make_arithmetic, make_tiny_model

FOLDER = Path("outputs/examples/dapo")


def main() -> None:
    if not FOLDER.exists():
        make_arithmetic.main(f"--output {FOLDER}/data --train 400 --heldout 20 --worked 20".split())
        make_tiny_model.main(["--output", f"{FOLDER}/model"])
    command = [sys.executable, "-m", "rlmath.cli.main", "train", "--dry-run", "--ranks", "2"]
    command += ["--config", "configs/demo.yaml", "--config", "configs/algorithms/dapo.yaml"]
    command += [f"run.output_dir={FOLDER}/run", f"model.path={FOLDER}/model"]
    command += [f"data.train_path={FOLDER}/data/train.jsonl", "reward.overlong_buffer=8"]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
