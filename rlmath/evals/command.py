"""The command line of evaluations: `python -m rlmath.evals`, `rlmath eval` and launch/evaluate.py.

Nothing that is imported here loads vLLM: a mistake is reported before.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rlmath.checkpoint.directory import METADATA_FILES
from rlmath.checkpoint.hf.config_json import read_model_shape
from rlmath.checkpoint.hf.peft import base_folder, engine_problems
from rlmath.config.help import all_settings, raise_problems
from rlmath.config.hub import HubFailedError, is_hub_id, parse_hub_id
from rlmath.config.length_curriculum import tool_tokens, validation_tokens
from rlmath.config.load import load_config
from rlmath.config.run_files import (
    ADAPTER_FOLDER,
    BEST_FOLDER,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    EXPORT_FOLDER,
    MODELS_FOLDER,
    adapter_alone,
)
from rlmath.config.schema import Config, RolloutConfig, ToolsConfig
from rlmath.distributed.device_kind import resolve_kind
from rlmath.distributed.fault_tolerance.exit_codes import (
    FAILURE,
    FINISHED,
    MISTAKE,
    SAVED_AND_STOPPED,
    write_exit_status,
)
from rlmath.distributed.fault_tolerance.preemption import INTERRUPT, on_signals
from rlmath.distributed.ranks import environment_rank
from rlmath.evals.benchmarks import find_benchmark, model_positions
from rlmath.evals.compare import comparison_text
from rlmath.evals.plan import DEFAULT_NEW_TOKENS, Plan, recorded_new_tokens
from rlmath.planning.checks import cuda_problems, isolation_problems
from rlmath.report.results_file import read_results
from rlmath.run.command_line import (
    log_mistake,
    mistakes_end_all_ranks,
    record_exit,
    set_up_rank_logging,
)
from rlmath.run.early_checks import missing_problems
from rlmath.telemetry.console import close_bars

logger = logging.getLogger(__name__)

DESCRIPTION = """Evaluate a model on benchmarks, and compare evaluations.

rlmath eval --model PATH --benchmarks aime24,amc23 --data-dir DIR --output DIR
rlmath eval ... --ranks N [--tensor-parallel T]    on so many ranks
rlmath eval --compare A B

PATH is a Hugging Face or PEFT folder, hf://org/name[@revision], a run's folder
or a checkpoint. Completions are kept under --output: the same command resumes a
stopped evaluation. docs/evaluation.md explains columns, files and formulas.
"""

CUDA_GRAPHS_HELP = (
    "capture decoding in CUDA graphs; without it vLLM runs with enforce_eager, as AReaL's and "
    "RLinf's evaluations do: "
    "they saw accuracy fall with CUDA graphs, most of all above 16k tokens"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, MISTAKE for a user's mistake, FAILURE for any other error."""
    set_up_rank_logging()
    arguments = parse(argv)
    try:
        if arguments.compare:
            print(comparison_text(*(read_results(path) for path in arguments.compare)))
            return 0
        plan = plan_of(arguments)
        rollout = rollout_of(arguments)
        raise_problems("this evaluation", input_problems(plan))
        machine = [
            *cuda_problems(arguments.device, "--device"),
            *isolation_problems(plan.tools),
        ]
        raise_problems("this machine", machine)
    except ValueError as error:
        return _end_with_mistake(arguments, error)
    # Imported after the checks: a mistake is reported before torch and vLLM are loaded.
    from rlmath.distributed import process
    from rlmath.distributed.rendezvous import MissingRanksError
    from rlmath.run.startup import end_broken

    try:
        stop_on_signal(plan.output)
        logger.info("Importing vLLM (seconds to a minute) ...")
        from rlmath.evals.runner import evaluate

        device_kind = resolve_kind(arguments.device)
        evaluate(
            plan,
            rollout,
            arguments.reward_workers,
            reward_timeout=arguments.reward_timeout,
            device_kind=device_kind,
        )
        record_exit(plan.output, FINISHED, "the tables are written")
        process.skip_collection_at_exit()
    except ValueError as error:
        return _end_with_mistake(arguments, error)
    except (MissingRanksError, HubFailedError) as error:
        log_mistake(error)
        record_exit(arguments.output, FAILURE, str(error))
        return FAILURE
    except BaseException as error:
        record_exit(arguments.output, FAILURE, f"{type(error).__name__}: {error}")
        end_broken()
    return 0


def _end_with_mistake(arguments: argparse.Namespace, error: ValueError) -> int:
    log_mistake(error)
    record_exit(None if output_problem(arguments) else arguments.output, MISTAKE, str(error))
    return MISTAKE


def stop_on_signal(output: Path) -> None:
    """Let this rank exit at once on Ctrl-C and on SIGUSR1, which Slurm sends before the time limit.

    Verified completions are on disk. SIGTERM is not handled: torchrun sends it to all ranks after
    one has failed."""

    def stop(number: int) -> None:
        try:
            if environment_rank() == 0:
                reason = INTERRUPT if number == signal.SIGINT else signal.Signals(number).name
                message = f"stopped by {reason}: the same command resumes"
                write_exit_status(output, SAVED_AND_STOPPED, message)
                close_bars()
                logger.warning("The evaluation was %s", message)
                logging.shutdown()
        finally:
            os._exit(SAVED_AND_STOPPED)

    on_signals((signal.SIGINT, signal.SIGUSR1), stop)


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan of what is sampled.

    Raises ValueError with all problems."""
    required = ("model", "benchmarks", "data_dir", "output")
    missing = [
        f"--{name.replace('_', '-')}" for name in required if getattr(arguments, name) is None
    ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be given (or --compare A B alone); --help describes the "
            "options"
        )
    problem = output_problem(arguments)
    if problem:
        raise ValueError(problem)
    if isinstance(arguments.model, str):
        parse_hub_id(arguments.model, "--model")
    run = run_config(arguments.model, logging.WARNING)
    if run is not None and run.environment.function is not None:
        raise ValueError(
            f'the run of --model "{arguments.model}" has environment.function, which an evaluation '
            "does not call yet. For its first answers copy the model to a folder outside of the run"
        )
    given_prompt = arguments.system_prompt
    as_given = """
    model data_dir output samples temperature top_p max_new_tokens max_prompt_tokens chat_template scorer seed limit
    """.split()
    kwargs = arguments.chat_template_kwarg or (run.data.chat_template_kwargs if run else ())
    return Plan(
        **{name: getattr(arguments, name) for name in as_given},
        benchmarks=tuple(dict.fromkeys(name for name in arguments.benchmarks.split(",") if name)),
        greedy=not arguments.no_greedy,
        default_new_tokens=_default_new_tokens(run, arguments),
        template=arguments.template or run_template(run, arguments.model),
        chat_template_kwargs=tuple(kwargs),
        system_prompt=run.data.system_prompt if run and given_prompt is None else given_prompt,
        answer_from=arguments.answer_from or (run.reward.answer_from if run else "boxed"),
        plugins=tuple(arguments.plugin),
        tools=_tools(run, arguments.tools),
    )


def _tools(run: Config | None, word: str | None) -> ToolsConfig:
    """The tool of --tools with the run's settings of it, where it has some; None: the run's own."""
    tools = ToolsConfig() if run is None else run.tools
    return tools if word is None else replace(tools, format=None if word == "none" else word)


def run_config(model: Path | str, level: int = logging.DEBUG) -> Config | None:
    """The settings of the run whose folder, export or checkpoint the model is.

    None where it is none of a run's, or they cannot be read, which is logged at this level."""
    if isinstance(model, Path) and model.name == ADAPTER_FOLDER:
        model = model.parent
    folder = model
    if isinstance(model, Path) and model.name in (EXPORT_FOLDER, BEST_FOLDER):
        folder = model.parent
    elif isinstance(model, Path) and model.parent.name in (CHECKPOINTS_FOLDER, MODELS_FOLDER):
        folder = model.parent.parent
    if isinstance(folder, str) or not (folder / CONFIG_FILE).is_file():
        return None
    try:
        return load_config([folder / CONFIG_FILE], [], saved=True)
    except ValueError as error:
        text = (
            "Nothing is taken from %s, which this release cannot read: give --template and the "
            "like. %s"
        )
        logger.log(level, text, folder / CONFIG_FILE, error)
        return None


def run_template(config: Config | None, model: Path | str) -> str:
    """The template of a run with these settings, else "auto".

    ValueError for a function: the command must name it."""
    if config is None:
        return "auto"
    template = config.validation.template or config.data.template
    if template not in all_settings()["data.template"].words:
        plugins = "".join(f" --plugin {plugin}" for plugin in config.run.plugins)
        raise ValueError(
            f'--template is not given, and the run of --model "{model}" has a function of yours: '
            "give "
            f"--template {template}{plugins}"
        )
    logger.info("Template: %s, as the run of %s has it", template, model)
    return template


def _default_new_tokens(run: Config | None, arguments: argparse.Namespace) -> int:
    """Default of --max-new-tokens.

    It is that of the completions in the output folder, else the run's."""
    recorded = recorded_new_tokens(arguments.output)
    if recorded is not None:
        return recorded
    return DEFAULT_NEW_TOKENS if run is None else validation_tokens(run)


def output_problem(arguments: argparse.Namespace) -> str:
    """The reason why nothing may be written into --output; "" if there is none."""
    output = arguments.output
    if output is None:
        return ""
    inputs = {"--model": arguments.model, "--data-dir": arguments.data_dir}
    paths = {option: path for option, path in inputs.items() if isinstance(path, Path)}
    conflicts = [option for option, path in paths.items() if path.resolve() == output.resolve()]
    conflicts += [
        f"a folder with a {name}"
        for name in ("config.json", "config.yaml")
        if (output / name).exists()
    ]
    return (
        f'--output "{output}" is {" and ".join(conflicts)}. Give a folder of its own.'
        if conflicts
        else ""
    )


def input_problems(plan: Plan) -> list[str]:
    """Problems of missing folders and benchmarks, and of lengths that the model cannot have.

    Ids of the hub are not missing yet."""
    problems = (
        list(missing_problems("--model", str(plan.model))) if isinstance(plan.model, Path) else []
    )
    if isinstance(plan.model, Path):
        problems += _position_problems(plan)
        problems += _adapter_problems(plan.model)
    problems += missing_problems("--data-dir", str(plan.data_dir))
    for name in plan.benchmarks if plan.data_dir.is_dir() else ():
        try:
            find_benchmark(name, plan.data_dir)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _position_problems(plan: Plan) -> Iterator[str]:
    """Problems of lengths, as far as the model's config.json is at hand."""
    model = Path(plan.model)
    run = run_config(model)
    places = [
        model,
        model / EXPORT_FOLDER,
        model / METADATA_FILES,
        *([Path(run.model.path)] if run else []),
    ]
    if (adapter := adapter_alone(model)) is not None:
        with suppress(ValueError):  # `_adapter_problems` says so
            places.append(base_folder(adapter))
    folder = next((place for place in places if (place / "config.json").is_file()), None)
    positions = None if folder is None else model_positions(folder)
    new_tokens = plan.max_new_tokens
    prompt_tokens = plan.max_prompt_tokens or 1
    output_tokens = tool_tokens(plan.tools)
    if (
        positions is not None
        and new_tokens is not None
        and prompt_tokens + new_tokens + output_tokens > positions
    ):
        with_tools = f" and {output_tokens} tokens of tools' outputs" if output_tokens else ""
        with_prompts = (
            "" if plan.max_prompt_tokens is None else f" with --max-prompt-tokens {prompt_tokens}"
        )
        yield (
            f"--max-new-tokens is {new_tokens}{with_prompts}{with_tools}; "
            f"the model has {positions} positions "
            "for a "
            "prompt and its "
            f"completion (max_position_embeddings in {folder}/config.json). Lower it, or leave it "
            "out for as many as "
            "the prompts leave"
        )


def _adapter_problems(model: Path) -> Iterator[str]:
    """Problems of a folder of adapters (LoRA) alone, and of the model that they belong to."""
    if (adapter := adapter_alone(model)) is None:
        return
    try:
        shape = read_model_shape(base_folder(adapter))
    except ValueError as error:
        yield f"--model: {error}"
    else:
        yield from engine_problems(adapter, shape)


def model_place(text: str) -> Path | str:
    """A path, or an id of the hub as it stands."""
    return text if is_hub_id(text) else Path(text)


def rollout_of(arguments: argparse.Namespace) -> RolloutConfig:
    """The settings of the engines.

    Raises ValueError with all problems."""
    names = ("tensor_parallel", "memory_share", "kv_cache_gib", "cpu_kv_cache_gib", "max_num_seqs")
    values = {name: getattr(arguments, name) for name in names}
    problems = [
        f"--{name.replace('_', '-')} is {value}; needed: {allowed}"
        for name, value in values.items()
        if None not in (value, allowed := all_settings()[f"rollout.{name}"].range)
        and not allowed.holds(value)
    ]
    raise_problems("the engines", problems)
    return RolloutConfig(cuda_graphs=arguments.cuda_graphs, **values)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; old names of options are replaced, with a warning."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two --output folders to compare")
    _add_sampling_options(parser.add_argument_group("what is sampled"))
    _add_engine_options(parser.add_argument_group("how it is computed"))
    add("stray", nargs="*", help=argparse.SUPPRESS)
    with mistakes_end_all_ranks():
        arguments = parser.parse_intermixed_args(argv)
        if arguments.stray:
            word = arguments.stray[0]
            hint = "" if arguments.model else f"; to evaluate that model give --model {word}"
            parser.error(f'"{word}" belongs to no option{hint}')
        return arguments


def _add_sampling_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    model_help = (
        "Hugging Face or PEFT folder, a run's folder (its newest model, with LoRA its adapters), a "
        "checkpoint, or hf://org/name[@revision]"
    )
    add("--model", type=model_place, help=model_help)
    add(
        "--benchmarks",
        help="names of files in --data-dir, separated by commas, for example aime24,math_500",
    )
    add("--data-dir", type=Path, help="folder of NAME.jsonl, .json, .parquet, or folders NAME")
    add(
        "--output",
        type=Path,
        help="folder for completions and tables; other settings need another one",
    )
    add("--samples", type=int, default=32, help="samples of each problem, 0 for none (default 32)")
    add("--temperature", type=float, default=0.6, help="of the samples (default 0.6)")
    add("--top-p", type=float, default=0.95, help="of the samples (default 0.95)")
    new_help = (
        "longest completion (default: the run's of --model, else 32768, but no more than "
        "the model has room for)"
    )
    add("--max-new-tokens", type=int, help=new_help)
    prompt_help = "longer prompts count as wrong; default: all must fit the model"
    add("--max-prompt-tokens", type=int, help=prompt_help)
    add("--no-greedy", action="store_true", help="no completion at temperature 0")
    template_help = "as data.template, see docs/data.md (default: the run's of --model, else auto)"
    add("--template", help=template_help)
    chat_help = (
        "as data.chat_template: a name or a .jinja file (default: the model's, which is its run's)"
    )
    add("--chat-template", help=chat_help)
    system_help = "as data.system_prompt (default: the run's of --model)"
    add("--system-prompt", help=system_help)
    kwargs_help = (
        "NAME=VALUE, as one of data.chat_template_kwargs; may be given again (default: "
        "the run's of --model)"
    )
    add("--chat-template-kwarg", action="append", help=kwargs_help)
    answer_help = (
        "as reward.answer_from, see docs/rewards.md (default: the run's of --model, else boxed)"
    )
    add("--answer-from", choices=all_settings()["reward.answer_from"].words, help=answer_help)
    scorer_help = (
        "function of yours that says what is right, as validation.scorer, see docs/hooks.md"
    )
    add("--scorer", help=scorer_help)
    plugins_help = (
        "module or file of yours that registers functions, as run.plugins; may be given again"
    )
    add("--plugin", action="append", default=[], help=plugins_help)
    tools_help = (
        "tool that completions call, as tools.format, or none (default: the run's of --model, "
        "which has its limits, too; see docs/tool_use.md)"
    )
    words = [*all_settings()["tools.format"].words, "none"]
    add("--tools", choices=words, help=tools_help)
    add("--seed", type=int, default=1, help="of the samples (default 1)")
    add(
        "--limit",
        type=int,
        help="number of problems of each benchmark, from the first on (default: all)",
    )


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--tensor-parallel",
        type=int,
        default=1,
        help="ranks of one engine; divides the ranks (default 1)",
    )
    add("--cuda-graphs", action="store_true", help=CUDA_GRAPHS_HELP)
    add(
        "--memory-share",
        type=float,
        default=0.9,
        help="GPU: share of its memory for the engine (default 0.9)",
    )
    add(
        "--kv-cache-gib",
        type=float,
        help="GPU: KV cache of a rank, in GiB; needed where ranks share a GPU",
    )
    add(
        "--cpu-kv-cache-gib",
        type=float,
        default=0.5,
        help="CPU: KV cache of a rank, in GiB (default 0.5)",
    )
    add(
        "--max-num-seqs", type=int, default=256, help="most sequences decoded at once (default 256)"
    )
    workers_help = "processes per engine that verify answers (default 2)"
    timeout_help = "time limit of one answer, in seconds (default 5)"
    add("--reward-workers", "--judges", type=int, default=2, help=workers_help)
    add("--reward-timeout", "--judge-timeout", type=float, default=5.0, help=timeout_help)
    device_help = "default auto: cuda if there is one"
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help=device_help)
