"""Advantages, a selection of groups and a metric of your own, registered by name.

    python docs/examples/hooks.py

Rewards are shares of digits. Only the best completion of a group is learned from, and only of
groups whose completions differ enough. This file is the plugin, too: workers import it for what it
registers.
"""

from pathlib import Path

from rlmath import hooks, load_config, train

FOLDER = Path("outputs/examples/hooks")


@hooks.reward("digits")
def digits(completion: str, solutions: list[str], row: dict) -> float:
    """Share of digits in a completion."""
    return sum(character.isdecimal() for character in completion) / max(1, len(completion))


@hooks.advantage("best_only")
def best_only(rewards: list[list[float]], tokens: list[list[int]]) -> list[list[float]]:
    """Above 0 for the best completions of each group, below 0 for the others."""
    return [[float(reward == max(row)) - 1 / len(row) for reward in row] for row in rewards]


@hooks.selection("spread_out")
def spread_out(group: hooks.Group) -> bool:
    """Whether rewards differ by a tenth."""
    return max(group.rewards) - min(group.rewards) > 0.1


@hooks.metric("best")
def best(groups: list[hooks.Group]) -> float:
    """Mean of the groups' best rewards."""
    return sum(max(group.rewards) for group in groups) / len(groups)


def main() -> None:
    if not FOLDER.exists():
        # Imported here: workers import this file, and have no use for torch.
        from rlmath.cli import make_arithmetic, make_tiny_model

        make_arithmetic.main(f"--output {FOLDER}/data --train 200 --heldout 20 --worked 20".split())
        make_tiny_model.main(["--output", f"{FOLDER}/model"])
    config = load_config(
        "configs/demo.yaml",
        run={"output_dir": FOLDER / "run", "total_steps": 6, "plugins": [__file__]},
        model={"path": FOLDER / "model"},
        data={"train_path": FOLDER / "data" / "train.jsonl", "prompts_per_step": 16},
        parallel={"tensor": 1},
        optimizer={"lr": 1e-3, "warmup_steps": 0, "decay": "constant"},
        reward={"function": "digits"},
        algorithm={"advantage": "best_only", "n_minibatches": 1},
        selection={"dynamic_sampling": "spread_out", "max_extra_prompts": 8},
        telemetry={
            "metrics": ["best"],
            "warn_truncated": 1,
        },  # a random model seldom ends by itself
    )
    run = train(config, ranks=2)
    for row in run.metrics():
        dropped = row["selection/dropped/rule"]
        print(
            f"step {row['step']:.0f}: best {row['own/best']:.3f}, {dropped:.0f} groups dropped by "
            "the rule"
        )


if __name__ == "__main__":
    main()
