"""What Weights & Biases lacks is told before a run starts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlmath.config.schema import TelemetryConfig
from rlmath.telemetry.wandb import wandb_problems

pytestmark = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs rlmath[wandb]")


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch):
    """A home without a login, and a server that nobody can reach."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("NETRC", raising=False)


def problems(mode: str, **environment: str) -> list[str]:
    """In a program of its own: wandb keeps what it once read."""
    source = (
        "import json, sys; from rlmath.config.schema import TelemetryConfig;"
        "from rlmath.telemetry.wandb import wandb_problems;"
        "print(json.dumps(wandb_problems(TelemetryConfig(wandb=sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, mode],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.usefixtures("no_account")
def test_online_without_a_key_is_told_before_the_start():
    (problem,) = problems("online")
    assert "no API key for http://127.0.0.1:9" in problem and "telemetry.wandb=offline" in problem


@pytest.mark.usefixtures("no_account")
def test_a_key_is_found_in_the_environment_and_in_netrc_and_a_short_one_is_refused(tmp_path: Path):
    assert problems("online", WANDB_API_KEY="0" * 40) == []
    (problem,) = problems("online", WANDB_API_KEY="0" * 5)
    assert "cannot be used" in problem and "wandb login" in problem
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine 127.0.0.1:9 login user password {'0' * 40}\n")
    netrc.chmod(0o600)
    assert problems("online") == []


def test_a_missing_package_is_told_with_how_to_install_it(tmp_path: Path, monkeypatch):
    """A folder "wandb", such as W&B itself leaves where it is run, is no package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not hasattr(f, "MAPPING")])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    for mode in ("offline", "online"):
        (problem,) = wandb_problems(TelemetryConfig(wandb=mode))
        assert "pip install rlmath[wandb]" in problem
    assert wandb_problems(TelemetryConfig(wandb="off")) == []
