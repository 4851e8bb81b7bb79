"""What a Dockerfile and a .dockerignore say: instructions by stage, and the files that an image may copy.

Only what the Dockerfile of this repository uses; the rest is refused by tools/run_stage.py, not guessed.
The rules are those of Docker's reference: https://docs.docker.com/reference/dockerfile/
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

FROM = re.compile(r"(?P<image>\S+)(?:\s+AS\s+(?P<stage>\S+))?", re.IGNORECASE)


@dataclass(frozen=True)
class Instruction:
    """One instruction: RUN, its text with the lines joined, and the line it starts at."""

    name: str
    text: str
    line: int


@dataclass(frozen=True)
class Stage:
    """A FROM and the instructions below it. `base` is an image or the name of an earlier stage."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]


def read_instructions(text: str) -> list[Instruction]:
    """Instructions in their order; comments and empty lines are left out, also those between joined lines."""
    found: list[Instruction] = []
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        start = start if parts else number
        parts.append(stripped.removesuffix("\\").rstrip())
        if not stripped.endswith("\\"):
            name, _, rest = " ".join(parts).partition(" ")
            found.append(Instruction(name.upper(), rest.strip(), start))
            parts = []
    if parts:
        raise ValueError(f"line {start}: the last line ends in a backslash; take it away or go on after it")
    return found


def read_stages(text: str) -> dict[str, Stage]:
    """Stages by name, in their order; one without a name is called by its number, as Docker does."""
    stages: dict[str, Stage] = {}
    for instruction in read_instructions(text):
        if instruction.name == "FROM":
            match = FROM.fullmatch(instruction.text)
            if match is None:
                raise ValueError(
                    f"line {instruction.line}: FROM {instruction.text} is not FROM IMAGE [AS STAGE]"
                )
            name = match["stage"] or str(len(stages))
            stages[name] = Stage(name, match["image"], ())
        elif stages:
            last = stages[next(reversed(stages))]
            stages[last.name] = Stage(last.name, last.base, (*last.instructions, instruction))
        elif instruction.name != "ARG":
            raise ValueError(f"line {instruction.line}: {instruction.name} before the first FROM")
    return stages


def context_files(context: Path) -> list[Path]:
    """The files below `context`, relative to it and sorted, that its .dockerignore lets into an image."""
    ignore = context / ".dockerignore"
    patterns = read_patterns(ignore.read_text(encoding="utf-8")) if ignore.exists() else []
    kept: list[Path] = []
    for folder, folders, files in os.walk(context):
        here = Path(folder).relative_to(context)
        folders[:] = [name for name in folders if may_hold_files(here / name, patterns)]
        kept += [here / name for name in files if not is_ignored(here / name, patterns)]
    return sorted(kept)


@dataclass(frozen=True)
class Pattern:
    """A line of .dockerignore: what it matches, and whether it takes files in again (a line with `!`)."""

    text: str
    matches: re.Pattern[str]
    keeps: bool


def read_patterns(text: str) -> list[Pattern]:
    lines = [line.strip() for line in text.splitlines()]
    patterns = []
    for line in lines:
        if line and not line.startswith("#"):
            path = line.removeprefix("!").strip("/")
            patterns.append(Pattern(path, path_expression(path), line.startswith("!")))
    return patterns


def path_expression(pattern: str) -> re.Pattern[str]:
    """`*` and `?` stay within a folder's name, `**` is any number of folders; what lies below a match matches, too."""
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(tokens.get(part, re.escape(part)) for part in parts) + "(?:/.*)?")


def is_ignored(path: Path, patterns: list[Pattern]) -> bool:
    """The last line that matches decides."""
    ignored = False
    for pattern in patterns:
        if pattern.matches.fullmatch(path.as_posix()):
            ignored = not pattern.keeps
    return ignored


def may_hold_files(folder: Path, patterns: list[Pattern]) -> bool:
    """Whether the folder is to be looked into: it is not ignored, or a later line may keep something below it."""
    below = folder.as_posix() + "/"
    return not is_ignored(folder, patterns) or any(p.keeps and p.text.startswith(below) for p in patterns)
