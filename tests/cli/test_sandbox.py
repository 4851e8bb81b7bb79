"""`rlmath sandbox`, and what doctor says of isolation."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from rlmath.cli import doctor
from rlmath.cli.sandbox import main
from rlmath.sandbox import kernel

ISOLATION = f"--isolation={kernel.best_isolation()}"


def test_files_are_calls_of_one_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = {"a.py": "x = 6", "b.py": "print('é'); x * 7", "c.py": "x / 0"}
    for name, source in sources.items():
        (tmp_path / name).write_text(source, encoding="utf-8")
    files = [str(tmp_path / name) for name in sources]
    assert main([ISOLATION, *files]) == 1
    streams = capsys.readouterr()
    assert (
        streams.out.startswith("é\n42\n") and "ZeroDivisionError: division by zero" in streams.out
    )
    lines = [line.split(",")[0] for line in streams.err.splitlines()]
    assert (
        lines[:2] == ["call 1: ok", "call 2: ok"]
        and lines[2].startswith("call 3: ")
        and len(lines) == 3
    )
    assert main([ISOLATION, "--state", "fresh", *files[:2]]) == 1
    assert "NameError" in capsys.readouterr().out


def test_standard_input_is_a_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("print('x' * 1000)"))
    assert main([ISOLATION, "--output-characters", "100", "-"]) == 0
    half = "x" * 50
    assert capsys.readouterr().out == f"{half}\n[... 901 characters left out ...]\n{half[1:]}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("/nowhere/code.py",), 'rlmath sandbox: there is no file "/nowhere/code.py".\n'),
        (("/",), '"/" cannot be read (Is a directory); needed: a file of Python'),
        (("--cpu-seconds", "-1", "-"), "--cpu-seconds is -1.0; needed: a finite number above 0"),
        (("--memory-gib", "nan", "-"), "--memory-gib is nan; needed: a finite number above 0"),
        (("--output-characters", "1", "-"), "--output-characters is 1; needed: at least 64"),
        (("--seed", "-1", "-"), "seed is -1; it must be a number of 64 bits"),
    ],
)
def test_mistakes_are_said(
    words: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1"))
    assert main([ISOLATION, *words]) == 2
    assert message in capsys.readouterr().err


def test_an_isolation_that_the_machine_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    monkeypatch.setattr("sys.stdin", io.StringIO("1"))
    assert main(["--isolation", "landlock"]) == 2
    assert 'set it to "preloaded"' in capsys.readouterr().err
    lines = [line for _, line in doctor.sandbox_lines()]
    assert lines[0].startswith("Landlock missing") and "needs a kernel with Landlock" in lines[1]
    assert lines[2].startswith("isolation preloaded: a call took ")
