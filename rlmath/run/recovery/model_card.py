"""The model card of an export, README.md: origin and training of the model, and measurements.

Strangers read it: it names no folders of this machine, and no text of settings can leave its
place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

import rlmath
from rlmath.config.files import read_regular
from rlmath.config.help import counted, setting_values
from rlmath.config.hub import is_hub_id, parse_hub_id
from rlmath.config.load import shown_values
from rlmath.config.run_files import ADAPTER_FOLDER, METRICS_FILE, VALIDATION_FILE
from rlmath.config.schema import Config
from rlmath.config.terminal import visible
from rlmath.telemetry.alerts import ENOUGH_KEPT
from rlmath.telemetry.metrics_writer import read_metrics

CARD_FILE = "README.md"
_MOST_BYTES = 2**20
"""Most bytes of the base model's card that are read; it names the model's licence."""
_ALL_KEPT = 0.9995
"""Share of what adapters learned from which a model has all of it: it reads as 100%."""
_LICENCE_FIELDS = ("license", "license_name", "license_link")
_OF_ONE_MACHINE = ("run.output_dir", "run.distributed_timeout_seconds", "run.hub_timeout_seconds")
_FOLDERS = re.compile(r"(?<![\w:/.])(?:~[\w.-]*)?/(?:[^\s/\"']+/)+")
"""Folders of an absolute path within a text."""
_MEASURES = {
    "task_reward": "mean reward",
    "rollout/accuracy": "accuracy of sampled answers",
    "held_out/loss": "held-out loss",
}


def model_card(
    config: Config,
    steps_done: int,
    total_steps: int | None,
    output_dir: Path | None = None,
    is_adapter: bool = False,
    kept: float = 1.0,
    adapter: str | None = ADAPTER_FOLDER,
) -> bytes:
    """The card of the model, or of its adapters alone, after so many steps.

    `total_steps` is None if it is not known; metrics are those in `output_dir` (None: the run's).
    The model has the share `kept` of what its adapters learned (`kept_text`, also on `adapter`)."""
    settings = shown_values(config)
    base = base_name(settings["model.path"])
    library = "peft" if is_adapter else "transformers"
    front = {"base_model": base, "library_name": library, "pipeline_tag": "text-generation"}
    front |= _licence(Path(config.model.path)) | {"tags": ["rlmath"]}
    kind = "supervised training" if _is_supervised(config, output_dir) else "reinforcement learning"
    steps = (
        counted(steps_done, "step")
        if total_steps is None
        else f"{steps_done} of {total_steps} steps"
    )
    data_paths = [settings["data.train_path"], *settings["data.more_train_paths"]]
    sections = [
        f"---\n{_yaml(front)}---",
        f"# {'LoRA adapters of ' if is_adapter else ''}{_code(base)}, trained by rlmath",
        f"Trained from {_code(base)} by {kind} with rlmath {rlmath.__version__}: {steps}.",
        *([text[0].upper() + text[1:] + "."] if (text := kept_text(kept, adapter)) else []),
        "## Data",
        "\n".join(f"- {_code(without_folders(path))}" for path in data_paths),
        *_measured(output_dir or Path(config.run.output_dir), steps_done),
        "## Settings",
        "Those that differ from the defaults.",
        _block(_yaml(_changed_settings(config))),
    ]
    return ("\n\n".join(sections) + "\n").encode("utf-8", "replace")


def kept_text(kept: float, adapter: str | None) -> str:
    """What a merged model has lost by rounding, and from ENOUGH_KEPT down what to take in its place.

    "" where it has all. `adapter` is the folder of its adapters; None: it was converted without.

    >>> kept_text(1.0, "adapter"), kept_text(0.991, "adapter")
    ('', 'rounded, the model keeps 99.1% of what was learned; adapter/ has all of it')
    >>> kept_text(0.17, "adapter").partition(": ")[2]
    'use that, or export with save.merged_dtype=float32'
    >>> kept_text(0.17, None).partition("; ")[2]
    'the adapters have all of it: convert by to-hf --adapter, or by --dtype float32'
    """
    if not kept < _ALL_KEPT:
        return ""
    if adapter is None:
        whole = "the adapters have all of it"
        advice = "convert by to-hf --adapter, or by --dtype float32"
    else:
        whole = f"{adapter}/ has all of it"
        advice = "use that, or export with save.merged_dtype=float32"
    text = f"rounded, the model keeps {100 * kept:.3g}% of what was learned; {whole}"
    return text if kept >= ENOUGH_KEPT else f"{text}: {advice}"


def base_name(model: str) -> str:
    """The id of a model on the hub, or the name of its folder.

    >>> base_name("/home/me/models--Qwen--Qwen3-8B/snapshots/0123"), base_name("models/tiny/")
    ('Qwen/Qwen3-8B', 'tiny')
    """
    if is_hub_id(model):
        return parse_hub_id(model, "model.path").repo
    parts = [part for part in Path(model).parts if part not in ("/", ".", "..")]
    cached = [part.split("--", 2)[1:] for part in parts if part.startswith("models--")]
    return "/".join(cached[-1]) if cached else visible(parts[-1] if parts else "model")


def without_folders(value: Any) -> Any:
    """A setting without the folders of this machine that its text names.

    >>> without_folders(["/home/me/data/a b.jsonl", "see ~/x/y.txt", "hf://org/name", "1/2"])
    ['a b.jsonl', 'see y.txt', 'hf://org/name', '1/2']
    """
    if isinstance(value, (list, tuple)):
        return [without_folders(part) for part in value]
    if isinstance(value, Mapping):
        return {key: without_folders(part) for key, part in value.items()}
    if not isinstance(value, str):
        return value
    if value.startswith(("/", "~")) and "\n" not in value:
        return value.rstrip("/").rpartition("/")[2]
    if value.startswith("../"):
        return value.rpartition("/")[2]
    return _FOLDERS.sub("", value.replace("file://", ""))


def _changed_settings(config: Config) -> dict[str, dict[str, Any]]:
    defaults = setting_values(Config())
    sections = dict[str, dict[str, Any]]()
    for key, value in shown_values(config).items():
        if value != defaults[key] and key not in _OF_ONE_MACHINE:
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = without_folders(value)
    return sections


def _licence(model: Path) -> dict[str, str]:
    """The licence fields of the base model's own card."""
    with suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        text = read_regular(model / CARD_FILE, _MOST_BYTES).decode()
        front = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
        values = yaml.safe_load(front[1]) if front else None
        if isinstance(values, dict):
            return {
                name: values[name] for name in _LICENCE_FIELDS if isinstance(values.get(name), str)
            }
    return {}


def _is_supervised(config: Config, output_dir: Path | None) -> bool:
    rows = _rows(output_dir or Path(config.run.output_dir), METRICS_FILE)
    return bool(rows) and "task_reward" not in rows[-1]


def _rows(output_dir: Path, name: str) -> list[dict[str, float]]:
    """Rows of metrics; none where they cannot be read, as the card is no reason to lose a model."""
    with suppress(OSError, ValueError):
        return read_metrics(str(output_dir), name)
    return []


def _measured(output_dir: Path, steps_done: int) -> Iterator[str]:
    """The section with metrics of the first and last of these steps, and of validations."""
    lines = []
    rows = [row for row in _rows(output_dir, METRICS_FILE) if 0 < row["step"] <= steps_done]
    for name, title in _MEASURES.items():
        steps = [row for row in rows if name in row]
        if steps:
            first_row = steps[0]
            last_row = steps[-1]
            lines.append(
                (title, first_row["step"], first_row[name], last_row["step"], last_row[name])
            )
    validated = [row for row in _rows(output_dir, VALIDATION_FILE) if row["step"] <= steps_done]
    for name in validated[-1] if validated else ():
        if name.endswith("accuracy"):
            first_row = next(row for row in validated if name in row)
            lines.append(
                (
                    _code(name),
                    first_row["step"],
                    first_row[name],
                    validated[-1]["step"],
                    validated[-1][name],
                )
            )
    if lines:
        yield "## Measured"
        yield "\n".join(
            [
                "| measure | step | value | step | value |",
                "|---|---|---|---|---|",
                *(
                    f"| {title} | {first:g} | {before:.4g} | {last:g} | {after:.4g} |"
                    for title, first, before, last, after in lines
                ),
            ]
        )


def _yaml(values: Mapping[str, Any]) -> str:
    """ASCII, so that no character of it does anything."""
    return yaml.safe_dump(dict(values), allow_unicode=False, sort_keys=False, width=10**6)


def _code(text: str) -> str:
    """Text as Markdown code on one line.

    >>> _code("a`b|c")
    "`a'b/c`"
    """
    plain = visible(text).replace("\n", " ").replace("\t", " ")
    return f"`{plain.replace(chr(96), chr(39)).replace('|', '/')}`"


def _block(text: str) -> str:
    """Lines that show as they stand; the fence is longer than any in them."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}yaml\n{text}{fence}"
