"""Readers of a Dockerfile's instructions by stage, and of the files that a .dockerignore lets pass.

They know only what the Dockerfile of this repository uses:
https://docs.docker.com/reference/dockerfile/"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

FROM = re.compile(r"(?P<image>\S+)\s+AS\s+(?P<stage>\S+)", re.IGNORECASE)


@dataclass(frozen=True)
class Instruction:
    """One instruction: RUN, and its text with the lines joined."""

    name: str
    text: str


@dataclass(frozen=True)
class Stage:
    """A FROM and the instructions below it.

    `base` is an image or the name of an earlier stage."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]


def read_instructions(text: str) -> list[Instruction]:
    """Instructions in their order, without comments and empty lines, even between joined lines."""
    lines = [line.strip() for line in text.splitlines()]
    plain_lines = [line for line in lines if line and not line.startswith("#")]
    joined = re.sub(r"\s*\\\n", " ", "\n".join(plain_lines))
    parts = (line.partition(" ") for line in joined.splitlines())
    return [Instruction(name.upper(), text.strip()) for name, _, text in parts]


def read_stages(text: str) -> dict[str, Stage]:
    """Stages by name, in their order; what is before the first FROM belongs to none."""
    stages: dict[str, Stage] = {}
    for instruction in read_instructions(text):
        if instruction.name == "FROM":
            match = FROM.fullmatch(instruction.text)
            assert match is not None, f"FROM {instruction.text} is not FROM IMAGE AS STAGE"
            stages[match["stage"]] = Stage(match["stage"], match["image"], ())
        elif stages:
            last = stages[next(reversed(stages))]
            stages[last.name] = Stage(last.name, last.base, (*last.instructions, instruction))
    return stages


def context_files(context: Path) -> set[str]:
    """The files below `context`, relative to it, that its .dockerignore lets into an image."""
    lines = [
        line.strip()
        for line in (context / ".dockerignore").read_text(encoding="utf-8").splitlines()
    ]
    patterns = [line for line in lines if line and not line.startswith("#")]
    paths = set()
    for folder, folders, files in os.walk(context):
        relative = Path(folder).relative_to(context)
        folders[:] = [name for name in folders if not _is_ignored(relative / name, patterns)]
        paths |= {
            (relative / name).as_posix()
            for name in files
            if not _is_ignored(relative / name, patterns)
        }
    return paths


def _is_ignored(path: Path, patterns: list[str]) -> bool:
    """Whether the last line that matches the path, or a folder above it, leaves it out.

    A line with `!` takes it in again."""
    ignored = False
    for pattern in patterns:
        if _expression(pattern.removeprefix("!").strip("/")).fullmatch(path.as_posix()):
            ignored = not pattern.startswith("!")
    return ignored


def _expression(pattern: str) -> re.Pattern[str]:
    """`*` and `?` stay within a folder's name, `**` is any number of folders."""
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(tokens.get(part, re.escape(part)) for part in parts) + "(?:/.*)?")
