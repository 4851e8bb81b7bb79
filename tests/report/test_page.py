"""What stands in the page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlmath.report.page import build_page
from rlmath.report.run_folder import read_runs
from rlmath.telemetry.metrics_writer import MetricsWriter
from tests.report.folders import HOSTILE, group, make_run, write_event, write_json, write_samples
from tests.report.test_accuracies import evaluation

PLOTLY = "window.Plotly = {};"
"""Stands for the library where nothing is drawn."""


class _Elements(HTMLParser):
    """Tags with their attributes, and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data
        else:
            self.text += data


def page_of(*folders: Path) -> str:
    return build_page(read_runs(folders), PLOTLY, datetime(2026, 1, 2))


def data_of(page: str) -> dict[str, Any]:
    return json.loads(_Elements(page).scripts[0])


def words_of(page: str) -> str:
    """The text, with a space where an element is."""
    return " ".join(re.sub("<[^>]*>", " ", page).split())


def titles(page: str) -> list[str]:
    return [figure["title"] for figure in data_of(page)["figures"]]


def run_with(folder: Path, metrics: dict[str, float]) -> Path:
    """A run of three steps, with these metrics and no others."""
    folder.mkdir()
    rows = [json.dumps({"step": step} | metrics) for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def test_a_supervised_run_has_no_figures_of_a_policy(tmp_path: Path) -> None:
    metrics = dict.fromkeys(
        ("train/loss", "train/grad_norm", "train/learning_rate", "memory_gib"), 0.5
    )
    page = page_of(run_with(tmp_path / "a", metrics | {"train/skipped_updates": 0.0}))
    assert titles(page) == ["Loss", "Gradient norm", "Learning rate", "Memory after each phase"]
    assert "<h2>Optimizer</h2>" in page and "<h2>Policy</h2>" not in page
    assert "<h2>Before and after</h2>" not in page
    assert "0 in every step: Updates skipped." in page


def test_an_asynchronous_run_shows_waits_and_staleness(tmp_path: Path) -> None:
    """The trainers wait 1 s in each step of 4 s.

    30% of its tokens are one step old, so they are 0.3 steps old on average."""
    metrics = {
        "seconds/step": 4.0,
        "seconds/wait_for_groups": 1.0,
        "rollout/trainer_busy_share": 0.75,
    }
    metrics |= {
        "rollout/staleness": 0.3,
        "rollout/staleness_max": 1.0,
        "rollout/staleness_waits": 0.0,
    }
    page = page_of(
        run_with(tmp_path / "a", metrics | {"rollout/staleness/0": 0.7, "rollout/staleness/1": 0.3})
    )
    assert titles(page) == [
        "Seconds by phase",
        "Idle and busy",
        "Trainers wait for groups",
        "Staleness",
    ]
    phases = data_of(page)["figures"][0]
    assert [(trace["name"], trace["y"][0]) for trace in phases["traces"]] == [
        ("wait for groups", 1.0)
    ]


def test_a_run_has_its_figures_and_no_empty_ones(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "a"))
    assert titles(page) == [
        "Accuracy",
        "Reward",
        "Validation accuracy",
        "Entropy",
        "Learning rate",
        "Seconds by phase",
        "Memory after each phase",
    ]
    assert "0 in every step: Truncated completions." in page
    assert page.count('class="plot"') == 7
    text = _Elements(page).text
    assert "40% of the completions were cut off" in text and "step 2" in text
    assert "TP1 x PP1 x DP1" in text and "finished" in text


def test_a_card_names_the_steps_of_its_means(tmp_path: Path) -> None:
    """Accuracies are twelfths of the step.

    Of 12 steps the last 4 are compared with the first 4, of 3 the last with the first."""
    text = words_of(page_of(make_run(tmp_path / "a")))
    assert "Accuracy 87.5% of the completions in steps 9 to 12; 20.8% in steps 1 to 4 " in text
    assert "Reward 0.2594 mean in steps 9 to 12; 0.06243 in steps 1 to 4 " in text
    text = words_of(page_of(run_with(tmp_path / "b", {"train/loss": 0.5})))
    assert "Training loss 0.5 in step 3; 0.5 in step 1 " in text


def test_rewards_above_0_have_a_figure_of_their_own_beside_an_earlier_accuracy(
    tmp_path: Path,
) -> None:
    """A run that went on in a version which calls them so: both names, each over its steps."""
    folder = tmp_path / "a"
    writer = MetricsWriter(str(folder), tensorboard=False)
    for step, name in ((1, "accuracy"), (2, "reward_positive")):
        writer.write(step, {f"rollout/{name}": 0.5, "task_reward": 1.0, "seconds/step": 1.0})
        writer.write_validation(step, {f"validation/{name}": 0.25, f"validation/own/{name}": 0.25})
    writer.close()
    page = page_of(folder)
    assert titles(page)[:5] == [
        "Accuracy",
        "Rewards above 0",
        "Reward",
        "Validation accuracy",
        "Validation rewards above 0",
    ]


def figure(page: str, title: str) -> dict[str, Any]:
    (titled_figure,) = [each for each in data_of(page)["figures"] if each["title"] == title]
    return titled_figure


def test_groups_that_selection_dropped_teach_nothing(tmp_path: Path) -> None:
    """All 12 groups had different rewards, and none was learned from.

    In the second run, which has metrics of old, 3 of 12 were."""
    dropped_metrics = {"rollout/groups_with_contrast": 1.0, "train/teaching_groups": 0.0}
    groups_figure = figure(page_of(run_with(tmp_path / "a", dropped_metrics)), "Groups that teach")
    assert [trace["name"] for trace in groups_figure["traces"]] == [
        "different rewards"
    ] and groups_figure["legend"]
    assert groups_figure["note"].endswith("; 0 in every step: learned from")
    old_metrics = {
        "rollout/groups_with_contrast": 1.0,
        "selection/groups_sampled": 12.0,
        "selection/groups_learned": 3.0,
    }
    groups_figure = figure(page_of(run_with(tmp_path / "b", old_metrics)), "Groups that teach")
    assert {trace["name"]: trace["y"][0] for trace in groups_figure["traces"]} == {
        "learned from": 0.25,
        "different rewards": 1.0,
    }
    unselected = run_with(tmp_path / "c", {"rollout/groups_with_contrast": 0.5})
    groups_figure = figure(page_of(unselected), "Groups that teach")
    assert {trace["name"]: trace["y"][0] for trace in groups_figure["traces"]} == {
        "learned from": 0.5,
        "different rewards": 0.5,
    }


@pytest.mark.parametrize(
    ("metrics", "title", "ends"),
    [
        ({"rollout/accuracy": 1.0}, "Accuracy", [0, 1.02]),
        ({"rollout/accuracy": 0.9}, "Accuracy", [0, 1.02]),
        ({"rollout/accuracy": 0.1}, "Accuracy", [0, 0.1575]),
        (
            {"reward/verdict/string": 0.75, "reward/verdict/no_answer": 0.25},
            "What decided on the answers",
            [0, 1.02],
        ),
        ({"train/mfu": 1.5}, "Model FLOP utilisation", [0, 2.3625]),
        ({"task_reward": -1.0}, "Reward", None),
    ],
)
def test_an_axis_of_shares_ends_at_all(
    tmp_path: Path, metrics: dict[str, float], title: str, ends: list[float] | None
) -> None:
    """A share that is more is shown: an MFU on a machine whose peak was measured too low."""
    assert figure(page_of(run_with(tmp_path / "a", metrics)), title)["range"] == ends


def test_an_axis_of_rising_shares_has_no_place_beyond_its_ends(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "a", {})
    rows = [{"step": 1, "rollout/accuracy": 0.01}, {"step": 2, "rollout/accuracy": 0.99}]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    assert figure(page_of(folder), "Accuracy")["range"] == [0, 1.0196]


def test_axes_of_counts_are_whole(tmp_path: Path) -> None:
    metrics = {
        "selection/groups_sampled": 12.0,
        "selection/groups_learned": 2.0,
        "task_reward": 0.5,
    }
    page = page_of(run_with(tmp_path / "a", metrics))
    assert (
        figure(page, "Groups sampled and learned from")["whole"]
        and not figure(page, "Reward")["whole"]
    )


def test_one_validation_file_has_one_curve(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "a", {"task_reward": 1.0})
    row = {"step": 0, "validation/accuracy": 0.5, "validation/sums/accuracy": 0.5}
    (folder / "validation.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert [
        trace["name"] for trace in figure(page_of(folder), "Validation accuracy")["traces"]
    ] == ["sums"]


def test_accuracies_before_and_after_are_on_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", settings=[f"model.path={tmp_path}/base"])
    evaluation(tmp_path / "eval-base", tmp_path / "base", [0] * 12)
    evaluation(tmp_path / "eval-after", folder, [4] * 12, temperature="<b>")
    text = words_of(page_of(folder))
    assert "all files 25.0% 75.0% after step 12 75.0% after step 12 +50.0" in text
    assert "sums greedy 0.0% 0.0% to 24.2% 100.0% 75.8% to 100.0% +100.0 +62.6 to +100.0" in text
    assert "25.0% before training" in text and "No accuracy before training is known" not in text
    unknown = run_with(tmp_path / "elsewhere", {"rollout/accuracy": 1.0})
    assert "No accuracy before training is known" in _Elements(page_of(unknown)).text
    page_words = words_of(page_of(folder, unknown))
    assert "No accuracy of" in page_words and "+62.6 to +100.0" in page_words


def test_metrics_of_the_users_have_a_figure_for_each_function(tmp_path: Path) -> None:
    page = page_of(
        make_run(
            tmp_path / "a", **{"own/spread/most": 2.0, "own/spread/least": 1.0, "own/best": 0.5}
        )
    )
    users_figures = [
        figure for figure in data_of(page)["figures"] if figure["title"] in ("spread", "best")
    ]
    assert [[trace["name"] for trace in figure["traces"]] for figure in users_figures] == [
        ["best"],
        ["least", "most"],
    ]
    assert "<h2>Your metrics</h2>" in page


def test_phases_are_stacked_without_the_whole_step(tmp_path: Path) -> None:
    figures = data_of(page_of(make_run(tmp_path / "a")))["figures"]
    (phases,) = [figure for figure in figures if figure["stack"]]
    seconds = {trace["name"]: trace["y"][0] for trace in phases["traces"]}
    assert phases["title"] == "Seconds by phase"
    assert seconds == {"rollout": 1.0, "save": 0.25, "sleep": 0.125, "update": 1.5, "wake": 0.125}


def test_hostile_text_is_text_wherever_it_stands(tmp_path: Path) -> None:
    folder = make_run(
        tmp_path / "<b>name</b>", settings=[f"model.path={HOSTILE.replace(chr(0), '')}"]
    )
    hostile = group(HOSTILE, prompt=HOSTILE, solutions=[HOSTILE], prompt_id=HOSTILE)
    hostile["completions"][0] |= {
        "verdict": HOSTILE,
        "extracted": HOSTILE,
        "finish_reason": HOSTILE,
    }
    hostile["completions"][0] |= {"rewards": {HOSTILE: 1.0}, "failures": {HOSTILE: HOSTILE}}
    write_samples(folder, 3, [hostile])
    write_samples(folder, 4, [hostile], kind="failure")
    write_event(folder, "error", 4, text=f"{HOSTILE}\nmore {HOSTILE}")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
        metrics.write(
            json.dumps({"step": 99, f"selection/dropped/{HOSTILE}": 1, f"seconds/{HOSTILE}": 2})
            + "\n"
        )
    write_json(folder / "exit_status.json", {"status": 1, "message": HOSTILE, "meaning": HOSTILE})
    write_json(folder / "summary.json", {"layout": HOSTILE, "steps": HOSTILE})
    write_event(folder, "rollback", 4, text=HOSTILE)
    page = page_of(folder)
    elements = _Elements(page)
    assert [tag for tag, _ in elements.tags].count("script") == 3
    assert {"<", ">", "&"}.isdisjoint(elements.scripts[0])
    assert {"img", "b"}.isdisjoint(tag for tag, _ in elements.tags)
    assert not any(name.startswith("on") for _, attributes in elements.tags for name in attributes)
    assert not re.search(
        r"[\0-\x08\x0e-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", page
    )
    assert elements.text.count("</script><script>document.title='owned'") >= 5
    shown = next(
        shown_group
        for shown_group in data_of(page)["samples"][0]["groups"]
        if shown_group["step"] == 3
    )
    assert (
        shown["completions"][0]["text"].startswith("</script><script>")
        and "\\u202e\\x00" in shown["prompt"]
    )


def test_only_the_scripts_of_the_page_may_run_and_nothing_is_loaded(tmp_path: Path) -> None:
    elements = _Elements(page_of(make_run(tmp_path / "a")))
    (policy,) = [
        attributes["content"] for _, attributes in elements.tags if "http-equiv" in attributes
    ]
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in elements.scripts[1:]
    ]
    assert policy is not None and policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}';" in policy
    assert elements.scripts[1] == PLOTLY
    addresses = [
        value
        for _, attributes in elements.tags
        for name, value in attributes.items()
        if name in ("src", "href")
    ]
    assert all(value and value.startswith("#") for value in addresses)


def test_runs_are_overlaid_and_their_settings_compared(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "a" / "run", settings=["optimizer.lr=1e-5", "rollout.group_size=4"]),
        make_run(tmp_path / "b" / "run", settings=["optimizer.lr=3e-5", "rollout.group_size=4"]),
    ]
    page = page_of(*folders)
    (accuracy,) = [figure for figure in data_of(page)["figures"] if figure["title"] == "Accuracy"]
    names_and_colors = [(trace["name"][-5:], trace["color"]) for trace in accuracy["traces"]]
    assert names_and_colors == [("a/run", 0), ("b/run", 1)]
    keys = re.findall(r'<td class="key"><span title="[^"]*">([a-z_.]+)</span>', page)
    assert keys == ["run.output_dir", "optimizer.lr"]
    assert "<td>1e-05</td><td>3e-05</td>" in page


def test_a_run_of_10000_steps_is_a_small_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=20)
    rows = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    names = [name for name in rows[0] if name != "step"]
    dropped_names = [f"selection/dropped/{number}" for number in range(40)]
    lines = (
        json.dumps(
            {
                "step": step,
                **{name: (step * 7919 % 1000) / 999 for name in (*names, *dropped_names)},
            }
        )
        for step in range(1, 10_001)
    )
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for step in range(1, 1001):
        word_count = 4000 if step % 50 < 2 else 4
        write_samples(folder, step, [group("word " * word_count, correct=[True] * 20)] * 6)
    page = page_of(folder)
    assert len(page) < 7 * 2**20
    figures = data_of(page)["figures"]
    assert max(len(trace["y"]) for figure in figures for trace in figure.get("traces", ())) <= 1500
    shown_groups = data_of(page)["samples"][0]["groups"]
    assert max(len(shown_group["completions"]) for shown_group in shown_groups) <= 16
    assert (
        max(
            len(each["text"]) for shown_group in shown_groups for each in shown_group["completions"]
        )
        < 4100
    )
    assert "of the 1000 steps that have some" in page


def test_a_folder_of_damaged_files_gives_a_page_that_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    for name in ("config.yaml", "summary.json", "exit_status.json", "validation.jsonl"):
        (folder / name).write_bytes(b"\xff{[\0\n")
    (folder / "events.jsonl").unlink()
    (folder / "events.jsonl").mkdir()
    (folder / "samples" / "step-000002.jsonl").write_bytes(
        b'\xff\n{"prompt": 1}\n[]\n{"completions": 3}\n{"unfini'
    )
    text = _Elements(page_of(folder)).text
    for name in ("config.yaml", "summary.json", "exit_status.json", "events.jsonl"):
        assert f"{name} cannot be read" in text or f"{name}, " in text, name
    assert "validation.jsonl: 1 lines are no rows" in text
    assert "samples/: 5 lines or files are no samples" in text


@pytest.mark.parametrize(
    "name", ["config.yaml", "summary.json", "events.jsonl", "validation.jsonl", "samples"]
)
def test_a_file_that_is_not_there_is_no_matter(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "a")
    (folder / name).rename(tmp_path / "away")
    assert "Accuracy" in titles(page_of(folder))
