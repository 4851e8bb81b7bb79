"""A job for 2 nodes of a Slurm: its checks and its script, without submitting anything.

    python docs/examples/slurm_dry_run.py

Where no Slurm is installed it says what it could not ask; the rest is checked all the same.
"""

import subprocess
import sys
from pathlib import Path

from rlmath.cli import make_arithmetic, make_tiny_model

FOLDER = Path("outputs/examples/slurm_dry_run")


def main() -> None:
    if not FOLDER.exists():
        make_arithmetic.main(f"--output {FOLDER}/data --train 200 --heldout 20 --worked 20".split())
        make_tiny_model.main(["--output", f"{FOLDER}/model"])
    arguments = "submit --config configs/demo.yaml --nodes 2 --gpus-per-node 0 --ranks-per-node 1"
    arguments += (
        f" --time 1:00:00 --requeue --dry-run run.output_dir={FOLDER}/run model.path={FOLDER}/model"
    )
    arguments += f" data.train_path={FOLDER}/data/train.jsonl data.prompts_per_step=16"
    arguments += " optimizer.warmup_steps=1"
    command = [sys.executable, "-m", "rlmath.cli.main", *arguments.split()]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
