"""Partial rollouts: what is not complete at the end of a step goes on in the next one.

    python docs/examples/partial_rollouts.py

A random model hardly ever ends a completion by itself; most go on for three steps and more. Prints
how many are in flight after each step, and how old the oldest tokens are from which a step learns.
"""

from pathlib import Path

from rlmath import load_config, train
from rlmath.cli import make_arithmetic, make_tiny_model

FOLDER = Path("outputs/examples/partial_rollouts")


def main() -> None:
    if not FOLDER.exists():
        make_arithmetic.main(f"--output {FOLDER}/data --train 200 --heldout 20 --worked 20".split())
        make_tiny_model.main(["--output", f"{FOLDER}/model"])
    config = load_config(
        "configs/demo.yaml",
        run={"output_dir": FOLDER / "run", "total_steps": 10},
        model={"path": FOLDER / "model"},
        data={"train_path": FOLDER / "data" / "train.jsonl", "prompts_per_step": 8},
        parallel={"tensor": 1},
        optimizer={"warmup_steps": 1},
        rollout={
            "tail": "carry",
            "max_staleness": 2,
            "max_new_tokens": 96,
            "slice_tokens": 12,
            "group_size": 2,
        },
        reward={"mask_no_eos_with_zero": True},
        algorithm={
            "recompute_logprobs": True,
            "importance_correction": "token",
            "importance_mask_high": 5.0,
        },
    )
    run = train(config, ranks=2)
    for row in run.metrics():
        print(
            f"step {row['step']:.0f}: {row['rollout/sequences_in_flight']:.0f} completions in "
            "flight"
        )


if __name__ == "__main__":
    main()
