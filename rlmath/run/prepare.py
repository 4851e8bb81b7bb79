"""The steps that a start and its dry run share before any process group: settings, model, data."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlmath.checkpoint.hf.config_json import has_weights
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, Kind
from rlmath.data import dataset
from rlmath.data.audit import DataAudit
from rlmath.data.feedback import check_feedback
from rlmath.data.tool_chats import check_shown
from rlmath.data.tool_formats import check_format
from rlmath.planning.model_checks import check_teacher_tokenizer
from rlmath.planning.reward_checks import try_functions
from rlmath.rewards.reward_manager import Trial
from rlmath.run.recovery.resume import Origin, origin_of, sft_origin_of
from rlmath.telemetry.alerts import dropped_alert


@dataclass(frozen=True)
class RunData:
    """The prompts of a run, or the sequences of a supervised one."""

    inputs: Any
    """`dataset.Inputs` or `dataset.SftInputs`; without a tokenizer `dataset.PromptFiles`."""
    origin: Origin
    """Fingerprints; "" for those that cannot be known without weights or a tokenizer."""
    lines: tuple[str, ...] = ()
    """One or more for each file, for the console."""
    warnings: tuple[str, ...] = ()
    validation: tuple[dataset.ValidationFile, ...] = ()


def read_inputs(config: Config, shape: ModelShape, kind: Kind = "grpo") -> RunData:
    """Read prompts or sequences; ValueError for those from which a run could not learn.

    Without a tokenizer no prompt is dropped for its length, and there are no sequences."""
    problem = tokenizer_problem(config)
    weights = has_weights(Path(config.model.path))
    if kind == "sft":
        if problem is not None:
            raise ValueError(
                "the sequences of supervised training are written with a tokenizer, and cannot be "
                "counted: "
                f"{problem}. A dry run needs config.json and the tokenizer's files of the model, "
                "and transformers "
                "(rlmath install cpu, or gpu)."
            )
        inputs = dataset.load_sft_inputs(config, shape)
        return RunData(inputs, sft_origin_of(config, inputs, weights))
    if problem is not None:
        inputs = dataset.load_prompt_files(config, None)
        return RunData(inputs, replace(origin_of(config, inputs, weights), data=""))
    inputs = dataset.load_inputs(config, shape)
    check_format(inputs.tokenizer, config.tools, shape.vocab_size)
    texts = [prompt.text for prompt in inputs.prompts]
    check_shown(texts, config.tools, source="data.train_path")
    check_feedback(inputs.tokenizer, config, texts, shape.vocab_size)
    warnings = tuple(
        check_teacher_tokenizer(config.teacher.path, inputs.tokenizer, config.model.path)
    )
    return RunData(inputs, origin_of(config, inputs, weights), warnings=warnings)


def try_data(
    config: Config,
    shape: ModelShape,
    read: RunData,
    *,
    checks_data: bool = True,
    calls_functions: bool = True,
    examples: int = 1,
) -> RunData:
    """The data as read, with the validation's files; ValueError if a user's function fails on them.

    `checks_data` audits them, with so many `examples` of each irregularity; `calls_functions` tries
    the user's functions, which one rank does."""
    inputs = read.inputs
    if isinstance(inputs, dataset.SftInputs):
        lines = (*inputs.lines, *inputs.audit.lines())
        return replace(read, lines=lines, warnings=tuple(inputs.audit.warnings(examples)))
    tokenizer = getattr(inputs, "tokenizer", None)
    validation = dataset.load_validation(config, tokenizer, shape.vocab_size)
    for file in validation if tokenizer is not None else ():
        texts = [prompt.text for prompt in file.prompts]
        check_shown(texts, config.tools, source=file.path)
        if config.environment.function is not None:
            check_feedback(tokenizer, config, texts, shape.vocab_size)
    audit = (
        dataset.audit_inputs(config, inputs, validation, tokenizer=tokenizer)
        if checks_data
        else DataAudit()
    )
    trial = try_functions(config, inputs.prompts) if calls_functions else Trial()
    validation_lines = [line for file in validation for line in file.lines()]
    lines = (*inputs.lines, *validation_lines, *audit.lines(), *trial.lines)
    warnings = (*trial.warnings, *read.warnings, *audit.warnings(examples))
    return replace(read, lines=lines, warnings=warnings, validation=validation)


def tokenizer_problem(config: Config) -> str | None:
    """Why the model's tokenizer cannot be read; None if it can.

    It can if the model's folder has one and a package that reads it is installed."""
    folder = Path(config.model.path)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return f'"{folder}" has no tokenizer here'
    if importlib.util.find_spec("transformers") is None:
        return f'transformers is not installed, which reads the tokenizer of "{folder}"'
    return None


def dropped_warning(config: Config, data: RunData) -> str | None:
    """A dry run's warning about prompts dropped for their length, or of unchecked length."""
    problem = tokenizer_problem(config)
    if problem is None:
        return dropped_alert(data.inputs.dropped_share, config.telemetry, is_written=False)
    return (
        f"lengths were not checked: {problem}. Prompts longer than "
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} will be dropped, and steps may "
        "be fewer."
    )
