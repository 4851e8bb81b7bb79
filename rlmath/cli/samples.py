"""Show the sampled groups of a run on a terminal.

rlmath samples outputs/demo/run --groups 1 --only mixed
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlmath.answers.extraction import extract_answer, split_boxes
from rlmath.config.help import counted, no_run_text
from rlmath.config.load import load_config
from rlmath.config.run_files import CONFIG_FILE, SAMPLES_FOLDER
from rlmath.config.terminal import ends_with_its_reader, escape_terminal, visible
from rlmath.distributed.fault_tolerance.exit_codes import MISTAKE
from rlmath.telemetry.samples import (
    call_facts,
    completion_facts,
    read_samples,
    sample_files,
    text_with_outputs,
)


def main(argv: list[str] | None = None) -> int:
    """Prints the groups; MISTAKE and the cause on stderr where there is nothing to show."""
    escape_terminal()
    with ends_with_its_reader():
        return _show(argv)
    return 0


def _show(argv: list[str] | None) -> int:
    """Print the groups that the command line asks for; the exit status."""
    arguments = _parse_arguments(argv)
    try:
        path = _choose_file(arguments.run_dir, arguments.step)
        texts = [text for kind, text in _read_groups(path) if arguments.only in (None, kind)]
    except ValueError as error:
        print(f"rlmath samples: {error}", file=sys.stderr)
        return MISTAKE
    if not texts:
        selection = (
            f"group of kind {arguments.only!r}; leave out --only" if arguments.only else "groups"
        )
        print(f"rlmath samples: {path} has no {selection}", file=sys.stderr)
        return MISTAKE
    for text in texts[: arguments.groups]:
        print(text)
    return 0


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Show the sampled groups of a run.")
    parser.add_argument("run_dir", help="folder of the run (run.output_dir)")
    parser.add_argument("--step", type=int, help="step to show (default: the last)")
    parser.add_argument(
        "--groups", type=int, default=None, help="most groups to show (default: all)"
    )
    kinds = "groups whose completions are all right, all wrong, or some of each"
    parser.add_argument("--only", choices=("right", "wrong", "mixed"), help=kinds)
    arguments = parser.parse_args(argv)
    if arguments.groups is not None and arguments.groups < 1:
        parser.error(f"--groups is {arguments.groups}; needed: at least 1")
    return arguments


def _choose_file(run_dir: str, step: int | None) -> Path:
    """The samples' file of a step (None: the last); ValueError if there is none."""
    folder = Path(run_dir) / SAMPLES_FOLDER
    files = sample_files(run_dir)
    if not files:
        raise ValueError(_why_there_are_none(Path(run_dir)))
    chosen_step = max(files) if step is None else step
    if chosen_step not in files:
        raise ValueError(
            f"{folder} has no step {chosen_step}; it has {counted(len(files), 'step')}, "
            f"{min(files)} to {max(files)}"
        )
    return files[chosen_step]


def _why_there_are_none(run_dir: Path) -> str:
    """Why a folder has no samples, and what to give or to set."""
    if not run_dir.is_dir():
        return no_run_text(run_dir, "which is not there")
    if not (run_dir / CONFIG_FILE).is_file():
        return no_run_text(run_dir, f"which has no {CONFIG_FILE}")
    try:
        telemetry = load_config([run_dir / CONFIG_FILE], [], saved=True).telemetry
    except ValueError:
        return f'"{run_dir}" has no samples, and its {CONFIG_FILE} cannot be read.'
    if telemetry.sample_groups_per_step == 0:
        return (
            f'the run in "{run_dir}" keeps no samples: its telemetry.sample_groups_per_step is 0.'
        )
    return (
        f'the run in "{run_dir}" has no samples yet: no GRPO step is done (a supervised run '
        "has none)."
    )


def _read_groups(path: Path) -> list[tuple[str, str]]:
    """(kind, text to show) of every group in the file."""
    groups = []
    try:
        for number, row in read_samples(path):
            if isinstance(row, ValueError):
                raise row
            try:
                groups.append((_kind(row), format_group(row, path.stem)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a row of samples ({error!r})"
                ) from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return groups


def _kind(row: dict) -> str:
    verdicts = [completion["correct"] for completion in row["completions"]]
    return "right" if all(verdicts) else "mixed" if any(verdicts) else "wrong"


def format_group(row: dict, title: str) -> str:
    """A group as plain text in which no character of the model's can move the cursor."""
    right_count = sum(completion["correct"] for completion in row["completions"])
    lines = [
        f"===== {title}  {visible(row['prompt_id'])}  "
        f"{right_count} of {len(row['completions'])} right",
        *_indented(row["prompt"], "prompt    | "),
        *_indented("\n".join(row["solutions"]), "solutions | "),
    ]
    for number, completion in enumerate(row["completions"], start=1):
        lines.append(f"--- {number}: {completion_facts(completion)}")
        lines.extend(_answer_lines(completion))
        for name, reason in (completion.get("failures") or {}).items():
            lines.extend(_indented(f"{name}: {reason}", "failed    | "))
        has_feedback = any(call["status"] == "feedback" for call in completion.get("calls") or ())
        for call, text in text_with_outputs(completion):
            if call is None:
                lines.extend(_indented(text.removesuffix("\n"), "          | "))
            else:
                label = "feedback" if has_feedback else "output"
                lines.append(f"{label:<10}> {call_facts(call)}")
                lines.extend(_indented(text.removesuffix("\n"), "          > "))
    return "\n".join(lines) + "\n"


def _answer_lines(completion: dict) -> list[str]:
    """The answer that was verified.

    A reward function of the user's is given the whole text, which follows: for it the answer that
    the text has, if there is one."""
    answer = completion["extracted"]
    if completion["verdict"] == "function":
        answer = split_boxes(extract_answer(completion["text"], "phrase") or "")[0]
        if not answer:
            return []
    return _indented(answer or "(none)", "answer    | ")


def _indented(text: str, first: str) -> list[str]:
    margin = " " * (len(first) - 2) + first[-2:]
    return (first + visible(text).replace("\n", f"\n{margin}")).split("\n")


if __name__ == "__main__":
    sys.exit(main())
