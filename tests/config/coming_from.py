"""The tables of docs/coming_from.md, made from `rlmath.config.aliases`.

python -m tests.config.coming_from      writes them into the page anew
"""

from __future__ import annotations

from pathlib import Path

from rlmath.config.aliases import TRAINERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming_from.md"


def table(trainer: str) -> list[str]:
    """The lines of a trainer's table, which the line with its name and "here" begins."""
    lines = [head(trainer), "|---|---|"]
    for written, counterpart in TRAINERS[trainer].items():
        name, comma, remark = written.partition(",")
        lines.append(f"| `{name}`{comma}{remark} | {counterpart} |")
    return lines


def head(trainer: str) -> str:
    return f"| {trainer} | here |"


def with_tables(page: str) -> str:
    """The page with today's tables in the place of its own."""
    trainer_of = {head(trainer): trainer for trainer in TRAINERS}
    lines: list[str] = []
    in_table = False
    for line in page.split("\n"):
        in_table = in_table and line.startswith("|")
        if line in trainer_of:
            lines += table(trainer_of[line])
            in_table = True
        elif not in_table:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
