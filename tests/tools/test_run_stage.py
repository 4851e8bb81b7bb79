"""tools/docker_files.py and tools/run_stage.py: what the files say, and instructions run as an engine would."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from tools.docker_files import Instruction, context_files, read_instructions, read_stages
from tools.run_stage import State, changed, copy, expand, run_stage

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = """\
# a comment
ARG BEFORE=1
FROM debian:1.2-slim AS first
ENV A=1 \\
    # between joined lines
    B="two words"

RUN true \\
    && echo "$A"
from first
USER 7
"""


def test_lines_are_joined_and_comments_between_them_are_left_out() -> None:
    assert read_instructions(DOCKERFILE)[2:4] == [
        Instruction("ENV", 'A=1 B="two words"', 4),
        Instruction("RUN", 'true && echo "$A"', 8),
    ]


def test_stages_go_by_their_name_or_number() -> None:
    stages = read_stages(DOCKERFILE)
    assert list(stages) == ["first", "1"]
    assert stages["first"].base == "debian:1.2-slim" and stages["1"].base == "first"
    assert [instruction.name for instruction in stages["1"].instructions] == ["USER"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("FROM a\nRUN x \\", "line 2: the last line ends in a backslash"),
        ("RUN x\nFROM a", "line 1: RUN before the first FROM"),
        ("FROM --platform=x a", "is not FROM IMAGE"),
    ],
)
def test_files_that_cannot_be_read_are_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_stages(text)


def make_files(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")


def kept(folder: Path, ignore: str) -> set[str]:
    (folder / ".dockerignore").write_text(ignore, encoding="utf-8")
    return {path.as_posix() for path in context_files(folder)} - {".dockerignore"}


def test_the_last_line_of_dockerignore_that_matches_decides(tmp_path: Path) -> None:
    make_files(
        tmp_path, "a.py", "key", "code/b.py", "code/deep/c.py", "code/__pycache__/b.pyc", "code/x.egg-info/t"
    )
    assert kept(tmp_path, "*\n!code\n**/__pycache__\n**/*.egg-info\n") == {"code/b.py", "code/deep/c.py"}
    assert kept(tmp_path, "# only one\n*\n!code/deep\n") == {"code/deep/c.py"}
    assert kept(tmp_path, "code/*\n!code/b.py\n?ey\n") == {"a.py", "code/b.py"}
    assert kept(tmp_path, "*.py\n") == {
        "key",
        "code/b.py",
        "code/deep/c.py",
        "code/__pycache__/b.pyc",
        "code/x.egg-info/t",
    }


def test_variables_come_from_what_was_set_before() -> None:
    state = changed(State(), Instruction("ARG", 'V="9.0;10.0"', 1))
    state = changed(state, Instruction("ENV", "HOME_OF=/opt/${V} PATH=/venv/bin:$PATH GONE=$NOTHING", 2))
    assert state.environment["HOME_OF"] == "/opt/9.0;10.0"
    assert (
        state.environment["PATH"].startswith("/venv/bin:/usr/local/sbin:") and state.environment["GONE"] == ""
    )
    state = changed(changed(state, Instruction("WORKDIR", "/opt", 3)), Instruction("WORKDIR", "deep", 4))
    assert state.folder == PurePosixPath("/opt/deep")
    assert expand("$V.x", {"V": "1"}) == "1.x"


@pytest.mark.parametrize(
    ("instruction", "told"),
    [
        (Instruction("ADD", "a b", 3), "line 3: ADD is not known here"),
        (Instruction("CMD", "make demo", 4), "no list like"),
        (Instruction("ENV", "NAME value", 5), "needs NAME=value"),
    ],
)
def test_what_only_an_engine_can_do_is_refused(instruction: Instruction, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        changed(State(), instruction)


def test_copy_takes_folders_by_their_contents_and_never_what_is_ignored(tmp_path: Path) -> None:
    context, root = tmp_path / "context", tmp_path / "root"
    make_files(context, "one.txt", "code/a.py", "secret")
    (context / ".dockerignore").write_text("secret\n.dockerignore\n", encoding="utf-8")
    folder = PurePosixPath("/opt/app")
    copy(Instruction("COPY", ". .", 1), root, folder, context)
    copy(Instruction("COPY", "one.txt /tmp/renamed.txt", 2), root, folder, context)
    copy(Instruction("COPY", "one.txt code/ /srv/", 3), root, folder, context)
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert found == {
        "opt/app/one.txt",
        "opt/app/code/a.py",
        "tmp/renamed.txt",
        "srv/one.txt",
        "srv/a.py",
    }
    with pytest.raises(ValueError, match="COPY finds no secret"):
        copy(Instruction("COPY", "secret /x", 4), root, folder, context)
    with pytest.raises(ValueError, match="needs an engine"):
        copy(Instruction("COPY", "--from=build /a /b", 5), root, folder, context)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can get to, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_a_stage_runs_with_its_own_environment_folder_and_user(open_folder: Path) -> None:
    """The root folder is `/` itself, and the stage works in a folder of the test's."""
    (open_folder / "Dockerfile").write_text(
        f"""
FROM none AS one
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG WORD=built
ENV KEPT=yes
WORKDIR {open_folder}/work
RUN echo "$WORD $KEPT $PWD ${{SECRET-none}}" > built \\
    && chmod 777 .
USER 65534:65534
CMD ["bash", "-c", "echo \\"${{WORD-none}} $KEPT $(id -u) $(id -g)\\" > started; exit 3"]
""",
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "tools/run_stage.py",
        "--stage",
        "one",
        "--root",
        "/",
        "--context",
        str(open_folder),
    ]
    environment = os.environ | {"SECRET": "told"}
    assert subprocess.run(command, cwd=ROOT, env=environment).returncode == 0
    assert subprocess.run([*command, "--start"], cwd=ROOT, env=environment).returncode == 3
    work = open_folder / "work"
    assert (work / "built").read_text().split() == ["built", "yes", str(work), "none"]
    assert (work / "started").read_text().split() == ["none", "yes", "65534", "65534"]
    assert (work / "started").stat().st_uid == 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_a_command_that_fails_ends_the_stage(tmp_path: Path) -> None:
    failing = (Instruction("RUN", "exit 4", 1), Instruction("RUN", f"touch {tmp_path}/too_far", 2))
    with pytest.raises(subprocess.CalledProcessError):
        run_stage(failing, Path("/"), tmp_path)
    assert not (tmp_path / "too_far").exists()
