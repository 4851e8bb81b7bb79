"""A data file of a form of your own, and a template of your own around its problems.

    python docs/examples/custom_data_form.py

The file has CSV-like rows with a column `sum`, some of which are no problems. Two steps are trained
on the rest.
"""

import json
from pathlib import Path

from rlmath import load_config, train

FOLDER = Path("outputs/examples/custom_data_form")


def sums(row: dict) -> dict | None:
    """{"sum": "12;30"} is the problem 12+30; a row without two numbers is left out."""
    numbers = row["sum"].split(";")
    if len(numbers) != 2:
        return None
    return {
        "prompt": "+".join(numbers),
        "solutions": [sum(map(int, numbers))],
        "query_id": row["name"],
    }


def with_equals_sign(problem: str, row: dict) -> str:
    """The text that the model continues."""
    return f"{problem}="


def main() -> None:
    rows = [{"name": f"sum-{n}", "sum": f"{n};{2 * n}" if n % 10 else "none"} for n in range(100)]
    if not FOLDER.exists():
        from rlmath.cli import make_tiny_model  # not at the top: workers import this file

        make_tiny_model.main(["--output", f"{FOLDER}/model"])
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (FOLDER / "sums.jsonl").write_text(text, encoding="utf-8")
    config = load_config(
        "configs/demo.yaml",
        run={"output_dir": FOLDER / "run", "total_steps": 2},
        model={"path": FOLDER / "model"},
        data={
            "train_path": FOLDER / "sums.jsonl",
            "format": f"{__file__}:sums",
            "template": f"{__file__}:with_equals_sign",
            "max_unusable_share": 0.2,
            "prompts_per_step": 16,
        },
        parallel={"tensor": 1},
        optimizer={"lr": 1e-3, "warmup_steps": 0, "decay": "constant"},
    )
    run = train(config, ranks=2)
    report = json.loads((run.folder / "data_report.json").read_text(encoding="utf-8"))
    print(f"{report['prompts']} prompts, {report['files'][0]['unusable']} rows left out")
    first = run.samples()[0]
    print(f"a prompt: {first['prompt']!r}, solutions {first['solutions']}")


if __name__ == "__main__":
    main()
