"""Weights & Biases as a second place for a run's numbers (`telemetry.wandb`).

The run never waits for it while it makes steps: a thread of its own passes the rows to the client,
and whatever fails there costs this log alone; `metrics.jsonl` is the same either way.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import queue
import secrets
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from rlmath.config.run_files import write_whole
from rlmath.config.schema import TelemetryConfig

logger = logging.getLogger(__name__)

WANDB_FOLDER = "wandb"
SERVICE = "wandb-core"
"""W&B's own process, which writes and sends; a child of ours."""
MOST_WAITING = 1000
"""Rows that may wait for that process. With more it is taken for stuck."""
FINISH_SECONDS = 60.0
"""How long the end of a run waits until everything is written or sent."""
FLUSH_SECONDS = 1.0
"""How much of an offline file a run may lose that breaks off."""


class WandbLog:
    """Hands rows to W&B.

    For rank 0 alone."""

    def __init__(
        self, output_dir: str, telemetry: TelemetryConfig, settings: Mapping[str, object]
    ) -> None:
        """`settings` become the W&B run's config.

        `telemetry.wandb` is not "off", and `wandb_problems` found none."""
        self._folder = Path(output_dir)
        self._telemetry = telemetry
        self._settings = dict(settings)
        self._wandb = _import_wandb()
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._given_up = False
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One step's numbers; returns at once."""
        if self._given_up:
            return
        try:
            self._rows.put_nowait((step, dict(values)))
        except queue.Full:
            self._give_up(f"{MOST_WAITING} steps wait for it")

    def close(self) -> None:
        """Wait until all is written or sent, at most FINISH_SECONDS.

        What is left then stays on this disk."""
        with suppress(queue.Full):
            self._rows.put_nowait(None)
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            self._give_up(f"it was not done within {FINISH_SECONDS:g} s after the last step")
            _end_service()
            self._thread.join(FINISH_SECONDS / 10)

    def _work(self) -> None:
        """Pass rows to W&B until the run ends; an error turns W&B off."""
        try:
            run = self._start()
            while (row := self._rows.get()) is not None:
                step, values = row
                run.log(values, step=step)
            run.finish()
        except (
            Exception
        ) as error:  # of a library with a process and a network behind it: the run continues
            self._give_up(f"{type(error).__name__}: {error}")
            _end_service()
        finally:
            with suppress(
                Exception
            ):  # else it is done again, and logged, when the interpreter ends
                self._wandb.teardown()

    def _start(self) -> Any:
        """Begin or resume the run at W&B."""
        telemetry = self._telemetry
        online = telemetry.wandb == "online"
        run = self._wandb.init(
            project=telemetry.wandb_project,
            name=telemetry.wandb_name or self._folder.resolve().name,
            id=run_id(self._folder),
            resume="allow" if online else None,
            dir=str(self._folder),
            mode=telemetry.wandb,
            config=self._settings,
            settings=self._wandb.Settings(**_quiet_settings()),
        )
        place = run.url if online else f"{run.dir}, to be sent by `wandb sync`"
        logger.info("Weights & Biases: run %s, %s", run.id, place)
        return run

    def _give_up(self, why: str) -> None:
        """Turn W&B off, with one warning."""
        with self._lock:
            if self._given_up:
                return
            self._given_up = True
        logger.warning(
            "Weights & Biases is off from here: %s. The run continues, all its numbers are in "
            "metrics.jsonl; what W&B "
            "had got is in %s, and `wandb sync` can send it",
            why,
            self._folder / WANDB_FOLDER,
        )


def _quiet_settings() -> dict[str, object]:
    """Numbers only: no console, code, git state, packages or machine, and nothing printed.

    Its stop button asks the run to save and stop; by itself it would interrupt it."""
    return {
        "silent": True,
        "console": "off",
        "disable_code": True,
        "save_code": False,
        "disable_git": True,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        "symlink": False,
        "finish_timeout": 0.8 * FINISH_SECONDS,
        "finish_timeout_raises": True,
        "x_transaction_log_flush_interval": FLUSH_SECONDS,
        "stop_fn": lambda: os.kill(os.getpid(), signal.SIGTERM),
    }


def _end_service() -> None:
    """End W&B's process, which may hang; the interpreter's end would wait for it."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name() == SERVICE:
                child.kill()


def run_id(output_dir: str | Path) -> str:
    """The id by which W&B recognises the folder's run when it is resumed.

    It is made and kept there when there is none."""
    path = Path(output_dir) / WANDB_FOLDER / "run_id.txt"
    if not path.exists():
        write_whole(path, secrets.token_hex(4) + "\n")
    return path.read_text(encoding="ascii").strip()


# ---------------------------------------------------------------- before the start


def wandb_problems(telemetry: TelemetryConfig) -> list[str]:
    """Problems of W&B for `telemetry.wandb`, for the rank that logs.

    Asks nothing, neither here nor over the network."""
    mode = telemetry.wandb
    if mode not in ("offline", "online"):
        return []
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # the latter: a folder "wandb" that happens to lie here
        return [
            f'telemetry.wandb is "{mode}", and the package wandb is not installed. Run `pip '
            "install rlmath[wandb]`, or "
            "set telemetry.wandb=off."
        ]
    if mode == "offline":
        return []
    online = 'telemetry.wandb is "online", and'
    try:
        host, key = _api_key()
    except (ImportError, AttributeError) as error:
        return [f"{online} this wandb is another than 0.31 ({error}). Install that one."]
    except (
        Exception
    ) as error:  # its own: a key that cannot be one, a settings file that cannot be read
        return [f"{online} its API key cannot be used: {error}. Run `wandb login` again."]
    if key is None:
        login = "Run `wandb login`, set WANDB_API_KEY, or set telemetry.wandb=offline."
        return [f"{online} there is no API key for {host}. {login}"]
    return []


def _api_key() -> tuple[str, object]:
    """W&B's server, and the key for it; None for none.

    Its own login finds the key (environment, .netrc, settings)."""
    _import_wandb()
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    host = str(wandb_setup.singleton().settings.base_url)
    return host, wbauth.authenticate_session(
        host=host, source="rlmath", prompt=False, update_session=False
    )


def _import_wandb() -> ModuleType:
    # Reports of its own troubles over the network, and advice for any library of language models
    # that is loaded.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
    import wandb  # here, because it takes seconds

    return wandb
