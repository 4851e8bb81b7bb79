"""What the commands print first, at 80 columns, and which heavy libraries they import for it.

python -m tests.cli.screens > tests/cli/screens.txt      writes the screens anew
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

from rlmath.cli.main import COMMANDS, main

ROWS = 24
HEAVY = ("torch", "vllm", "transformers", "megatron.core", "pyarrow", "sympy")
DEMO = ("--config", "configs/demo.yaml", "run.output_dir=/nowhere/out")
MISTAKES = (
    ("tarin",),
    ("train", *DEMO, "optimiser.lr=1"),
    (
        "train",
        *DEMO,
        "model.path=/nowhere/model",
        "data.train_path=/nowhere/x.jsonl",
        "data.template=row",
    ),
    ("sft", "--config", "/nowhere/my.yaml"),
    (
        "eval",
        "--model",
        "/nowhere/m",
        "--benchmarks",
        "tset",
        "--data-dir",
        "docs",
        "--output",
        "/nowhere/o",
    ),
    ("replay", "/nowhere/run"),
    ("convert", "to-hf", "--checkpoint", "/nowhere/run", "--output", "/nowhere/out"),
    ("plan", "--gpu", "H100"),
    ("submit", *DEMO),
    ("report", "/nowhere/run"),
    ("samples", "/nowhere/run"),
    ("sandbox", "/nowhere/code.py"),
    ("verify", "--input", "/nowhere/cases.jsonl", "--output", "out.jsonl"),
)


def screen(words: tuple[str, ...]) -> str:
    """The first ROWS lines, and the exit status."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code
    lines = output.getvalue().splitlines()
    omission = [f"... {len(lines) - ROWS} more lines"] if lines[ROWS:] else []
    imported = (
        [f"[imports {', '.join(modules)}]"]
        if (modules := [module for module in HEAVY if module in sys.modules])
        else []
    )
    text = "\n".join(
        [f"$ rlmath {' '.join(words)}", *lines[:ROWS], *omission, f"[status {status}]", *imported]
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    helps = [(command.name, "--help") for command in COMMANDS]
    print(
        "\n\n".join(screen(words) for words in [(), *helps, ("train", "--help", "sync"), *MISTAKES])
    )
