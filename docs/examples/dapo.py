"""The DAPO recipe (configs/algorithms/dapo.yaml) on top of a config of yours, without training:
what it would do.

    python docs/examples/dapo.py

It needs a model and data: those of two_rewards.py are made here likewise. The dry run checks
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
