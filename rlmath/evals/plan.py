"""Arguments that determine an evaluation's completions, and settings.json, which records them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmath.config.files import read_json
from rlmath.config.help import all_settings, raise_problems
from rlmath.config.run_files import write_whole
from rlmath.config.schema import Template, ToolsConfig
from rlmath.config.setting_types import Range
from rlmath.data.chat import ChatSettings
from rlmath.data.tool_chats import settings_with_tool
from rlmath.evals.pass_at_k import MOST_SAMPLES
from rlmath.rollout.sampling import request_seed
from rlmath.workers.hooks import NEEDED, Hook, function_problem, hook_of, plugin_problem

SETTINGS = "settings.json"
EARLIER = {
    "answer_from": "boxed",
    "chat_template_kwargs": [],
    "system_prompt": None,
    "tools": None,
}
"""Settings that settings.json did not name before November 30, 2026."""
GENERATIONS = "generations"
DEFAULT_NEW_TOKENS = 32768
GREEDY_INDEX = -1
"""Index of the greedy completion; samples are numbered from 0."""


@dataclass(frozen=True)
class Plan:
    """Arguments of launch/evaluate.py that determine what is sampled, by option name."""

    model: Path | str
    """Text: its id on the Hugging Face hub, with the commit once it is downloaded."""
    benchmarks: tuple[str, ...]
    data_dir: Path
    output: Path
    greedy: bool = True
    samples: int = 32
    temperature: float = 0.6
    top_p: float = 0.95
    max_new_tokens: int | None = None
    """None: `default_new_tokens`, or what the model's positions leave where that is less."""
    default_new_tokens: int = DEFAULT_NEW_TOKENS
    max_prompt_tokens: int | None = None
    """Longer prompts count as wrong; None: every prompt must fit."""
    template: Template = "auto"
    """Or a function of the user's."""
    chat_template: str | None = None
    """Chat template, as `data.chat_template`; the next two are as the settings of their names."""
    chat_template_kwargs: tuple[str, ...] = ()
    system_prompt: str | None = None
    answer_from: str = "boxed"
    """Place where an answer may stand, as `reward.answer_from`."""
    scorer: str | None = None
    """A function of the user's that says what is right; None: the verifier."""
    plugins: tuple[str, ...] = ()
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    """The tool that completions may call."""
    seed: int = 1
    limit: int | None = None
    """Number of problems of each benchmark, from the first on; None: all."""

    def __post_init__(self) -> None:
        """Raises ValueError with all problems."""
        settings = all_settings()
        ranges = {
            "samples": (self.samples, Range(0, MOST_SAMPLES)),
            "temperature": (
                self.temperature,
                Range(0.01, 100, why="For temperature 0 there is greedy."),
            ),
            "top-p": (self.top_p, settings["validation.top_p"].range),
            "max-new-tokens": (self.max_new_tokens, settings["rollout.max_new_tokens"].range),
            "max-prompt-tokens": (self.max_prompt_tokens, settings["data.max_prompt_tokens"].range),
            "seed": (self.seed, settings["run.seed"].range),
            "limit": (self.limit, Range(1)),
        }
        problems = [
            f"--{name} is {value}; needed: {allowed}. {allowed.why}".rstrip()
            for name, (value, allowed) in ranges.items()
            if value is not None and not allowed.holds(value)
        ]
        templates = settings["data.template"].words
        if self.template not in templates and ":" not in self.template and not self.plugins:
            problems.append(
                f"--template is {self.template!r}; needed: one of {', '.join(templates)}, or a "
                "function of yours as "
                f"{NEEDED}"
            )
        plugin_problems = [plugin_problem(plugin, "--plugin") for plugin in self.plugins]
        problems += filter(None, plugin_problems)
        if not problems:
            problems += filter(None, map(function_problem, self.hooks))
        if not self.benchmarks:
            problems.append(
                "--benchmarks is empty; needed: at least one, for example aime24,math_500"
            )
        if not self.greedy and self.samples == 0:
            problems.append(
                "--no-greedy with --samples 0 samples nothing; leave one of the two out"
            )
        raise_problems("the evaluation", problems)

    @property
    def chat(self) -> ChatSettings:
        names = ("--chat-template", "--chat-template-kwarg", "--system-prompt")
        settings = ChatSettings(
            self.chat_template, self.chat_template_kwargs, self.system_prompt, names
        )
        return settings_with_tool(settings, self.tools)

    @property
    def template_hook(self) -> Hook | None:
        return hook_of("template", "--template", self.template, self.plugins)

    @property
    def scorer_hook(self) -> Hook | None:
        return hook_of("scorer", "--scorer", self.scorer, self.plugins)

    @property
    def hooks(self) -> list[Hook]:
        """The functions of the user's."""
        return [hook for hook in (self.template_hook, self.scorer_hook) if hook is not None]

    @property
    def indices(self) -> tuple[int, ...]:
        """The indices of the completions of every problem."""
        return (*((GREEDY_INDEX,) if self.greedy else ()), *range(self.samples))


def completion_seed(seed: int, benchmark: str, problem_id: str, index: int) -> int:
    """Seed of one completion.

    It depends neither on the engine that samples it nor on the other completions."""
    return request_seed(seed, 0, f"{benchmark}/{problem_id}", sample_index=index)


# ---------------------------------------------------------------- settings.json
def check_settings(
    folder: Path, common: Mapping[str, Any], sampled: Mapping[str, Any] | None
) -> None:
    """Write settings.json, or compare with the existing one.

    Raises ValueError with the differences. `common` applies to every completion, `sampled` to those
    that are not greedy (None: there are none). Keys that begin with "about_" are not compared:
    "about_model" is named beside a "model" that differs. Settings of a folder without completions,
    left by an evaluation that failed at its start, are replaced."""
    path = folder / SETTINGS
    earlier = _read_settings(path) if _has_completions(folder) else {}
    if earlier.get("common"):
        earlier["common"] = EARLIER | earlier["common"]
    differences = [
        f"{name} was {_named(recorded, name)}, now it is {_named(current, name)}"
        for recorded, current in (
            (earlier.get("common"), common),
            (earlier.get("sampled"), sampled or {}),
        )
        for name, value in current.items()
        if recorded
        and name in recorded
        and recorded[name] != value
        and not name.startswith("about_")
    ]
    if differences:
        raise ValueError(
            f'--output "{folder}" holds completions of another evaluation: '
            f"{'; '.join(differences)}. "
            "Give another --output, or the same model and settings."
        )
    content = {
        "common": dict(common),
        "sampled": dict(sampled) if sampled else earlier.get("sampled"),
    }
    write_whole(path, json.dumps(content, indent=2) + "\n")


def recorded_new_tokens(folder: Path) -> int | None:
    """Longest completion that those in the folder could have.

    None without any, or where it is not known."""
    new_tokens = read_settings(folder).get("max_new_tokens") if _has_completions(folder) else None
    return new_tokens if type(new_tokens) is int else None


def _has_completions(folder: Path) -> bool:
    return any(file.stat().st_size for file in (folder / GENERATIONS).glob("*/*.jsonl"))


def _named(settings: Mapping[str, Any], name: str) -> str:
    about = settings.get(f"about_{name}")
    return repr(settings[name]) if about is None else f"{about!r} ({settings[name]})"


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of settings.json, all keys on one level."""
    content = _read_settings(folder / SETTINGS)
    return {**(content.get("common") or {}), **(content.get("sampled") or {})}


def _read_settings(path: Path) -> dict[str, Any]:
    """The content of settings.json by part; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); give another --output") from error
    parts = content.values() if isinstance(content, dict) else [content]
    if not all(part is None or isinstance(part, dict) for part in parts):
        raise ValueError(f"{path} was not written by an evaluation; give another --output")
    return content
