"""Ids of the Hugging Face hub, with the real huggingface_hub against a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.config import hub
from rlmath.config.hub import HubId, parse_hub_id
from rlmath.config.load import config_as_yaml, load_config
from tests.hub_server import TOKEN, Hub, hub_server
from tests.selection import matrix

MODEL = {
    "config.json": b'{"model_type": "qwen2"}',
    "generation_config.json": b'{"generation_config": 1}',
    "tokenizer.json": b'{"tokenizer": 1}',
    "tokenizer_config.json": b'{"tokenizer_config": 1}',
    "model.safetensors": bytes(range(256)) * 800,
    "pytorch_model.bin": b"a pickle",
    "training_args.bin": b"a pickle",
    "original/consolidated.pth": b"a pickle",
    "onnx/config.json": b"{}",
    "modeling.py": b"print()",
    "README.md": b"words",
}
NEEDED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
}
ROWS = b'{"question": "1+1?", "answer": "2"}\n' * 10
LIMIT = 60.0


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model and a data set, which this process asks."""
    with hub_server() as server:
        server.add("org/model").commit(MODEL)
        server.add("org/rows", "datasets").commit(
            {"data/train.jsonl": ROWS, "other.jsonl": b"{}\n", "x.pkl": b"p"}
        )
        for name, text in server.variables(tmp_path / "home").items():
            monkeypatch.setenv(name, text)
        yield server


def model(text: str = "hf://org/model") -> HubId:
    return parse_hub_id(text, "model.path")


def data(text: str = "hf://datasets/org/rows/data/train.jsonl") -> HubId:
    return parse_hub_id(text, "data.train_path")


def fetched(hub_id: HubId, seconds: float = LIMIT, recorded: Collection[HubId] = ()) -> Path:
    """Have an id in the cache; its place."""
    return Path(hub.fetch([hub_id], seconds, recorded)[hub_id].place)


# ---------------------------------------------------------------- how ids are written


@pytest.mark.parametrize(
    ("text", "setting", "found"),
    [
        ("hf://Qwen/Qwen2.5-0.5B", "model.path", HubId("Qwen/Qwen2.5-0.5B")),
        (f"hf://a/b#{'1' * 40}", "model.path", HubId("a/b", "", "1" * 40)),
        ("hf://datasets/a/b/c.jsonl", "data.train_path", HubId("a/b", "", "", "c.jsonl")),
        (
            f"hf://datasets/a/b@x%2Fy#{'1' * 40}/d/c.parquet",
            "validation.paths",
            HubId("a/b", "x/y", "1" * 40, "d/c.parquet"),
        ),
    ],
)
def test_ids_are_read_and_written_back(text: str, setting: str, found: HubId) -> None:
    assert parse_hub_id(text, setting) == found
    assert parse_hub_id(str(found), setting) == found


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("hf:/a/b", "model.path"),
        ("hf://a/b/c", "model.path"),
        ("hf://a/../b", "model.path"),
        ("hf://../b", "model.path"),
        ("hf://a/b@../../x", "model.path"),
        ("hf://datasets/a/b/c.jsonl", "model.path"),
        ("hf://a/b", "data.train_path"),
        ("hf://datasets/a/b/../../c.jsonl", "data.train_path"),
        ("hf://datasets/a/b/c.pkl", "data.train_path"),
    ],
)
def test_what_is_no_id_is_refused_with_the_form(text: str, setting: str) -> None:
    with pytest.raises(ValueError, match=r"needed: hf://") as error:
        parse_hub_id(text, setting)
    assert setting in str(error.value) and text in str(error.value)


def test_paths_are_no_ids_and_other_settings_take_none() -> None:
    settings = ["run.output_dir=o", "model.path=Qwen/Qwen2.5-0.5B", "data.train_path=org/name"]
    assert hub.hub_ids(load_config([], settings)) == []
    settings = [
        "run.output_dir=hf://a/b",
        "model.path=hf:/a/b",
        "data.train_path=t",
        "data.history_path=hf://c/d",
    ]
    with pytest.raises(ValueError, match="3 problems") as error:
        hub.hub_ids(load_config([], settings))
    assert "run.output_dir" in str(error.value) and "data.history_path" in str(error.value)


# ---------------------------------------------------------------- what is fetched


def test_a_model_is_fetched_without_pickles_code_and_folders(there: Hub) -> None:
    folder = fetched(model())
    assert {path.name for path in folder.rglob("*")} == NEEDED
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert there.downloads() == dict.fromkeys(NEEDED, 1)


def test_parts_of_a_download_that_was_killed_do_not_stay(there: Hub, tmp_path: Path) -> None:
    blobs = fetched(model()).parents[1] / "blobs"
    killed = blobs / "killed.incomplete"
    growing = blobs / "growing.incomplete"
    for part in (killed, growing):
        part.write_bytes(b"a part")
    os.utime(killed, (1, 1))
    fetched(model())
    assert not killed.exists() and growing.exists()


# ---------------------------------------------------------------- commits


def test_a_recorded_commit_is_kept_though_the_branch_has_moved(
    there: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = hub.fetch([model()], LIMIT).values()
    there.add("org/model").commit({**MODEL, "model.safetensors": b"moved"})
    (second,) = hub.fetch([model()], LIMIT).values()
    assert second.commit != first.commit
    # Another revision is asked for.
    assert fetched(model("hf://org/model@main"), recorded=[first]).name == second.commit
    there.asked.clear()
    folder = fetched(model(), recorded=[first, data()])
    assert folder.name == first.commit and there.asked == []
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    cut_off(monkeypatch, "offline")
    assert fetched(model(), recorded=[first, data()]) == folder and there.asked == []


def test_settings_are_written_with_the_commit_and_read_again(there: Hub) -> None:
    settings = ["run.output_dir=o", "model.path=hf://org/model@main", "critic.path=/a/folder"]
    settings += [
        "data.train_path=hf://datasets/org/rows/data/train.jsonl",
        "teacher.path=hf://org/model",
    ]
    settings += ["data.more_train_paths=[local.jsonl,hf://datasets/org/rows/other.jsonl]"]
    settings += ["validation.paths=[hf://datasets/org/rows/other.jsonl]"]
    config = load_config([], settings)
    pins = hub.fetch(hub.hub_ids(config), LIMIT)
    # What a program changes afterwards has the ids, too.
    placed = replace(hub.with_places(config, pins), run=replace(config.run, seed=5))
    commit = pins[model()].commit
    rows_commit = pins[data()].commit
    assert Path(placed.model.path).name == Path(placed.teacher.path or "").name == commit
    assert Path(placed.data.train_path).read_bytes() == ROWS
    assert placed.validation.paths == [placed.data.more_train_paths[1]]
    assert Path(placed.validation.paths[0]).read_bytes() == b"{}\n"
    assert placed.critic.path == "/a/folder" and placed.data.more_train_paths[0] == "local.jsonl"
    text = config_as_yaml(placed)
    assert (
        f"path: hf://org/model@main#{commit}\n" in text
        and f"path: hf://org/model#{commit}\n" in text
    )
    assert "snapshots" not in text
    assert f"train_path: hf://datasets/org/rows#{rows_commit}/data/train.jsonl\n" in text
    assert text.count(f"- hf://datasets/org/rows#{rows_commit}/other.jsonl\n") == 2


COMMIT = "1" * 40


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (f"hf://a/b#{COMMIT}", "hf://a/b", True),
        (f"hf://a/b#{COMMIT}", f"hf://a/b#{COMMIT}", True),
        (f"hf://a/b#{COMMIT}", f"hf://a/b#{'2' * 40}", False),
        (f"hf://a/b@main#{COMMIT}", "hf://a/b", False),
        ("hf://a/b", f"hf://a/b#{COMMIT}", False),
        (
            ["a.jsonl", f"hf://datasets/a/b#{COMMIT}/c.jsonl"],
            ["a.jsonl", "hf://datasets/a/b/c.jsonl"],
            True,
        ),
        (["a.jsonl"], ["a.jsonl", "hf://datasets/a/b/c.jsonl"], False),
        (f"folder#{COMMIT}", "folder", False),
        (1, 1, True),
        (1, None, False),
    ],
)
def test_an_id_is_the_same_as_what_was_recorded_of_it(old: object, new: object, same: bool) -> None:
    assert hub.is_same(old, new) is same


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("hub_id", "problem"),
    [
        (model("hf://org/missing"), r"hf://org/missing: the hub refuses it .*status 401.*HF_TOKEN"),
        (
            model("hf://org/model@v9"),
            r"@v9: the hub refuses it .*status 404.*Correct .* the revision",
        ),
        (
            data("hf://datasets/org/rows/train.jsonl"),
            r'org/rows/train.jsonl: there is no file "train.jsonl"',
        ),
        (
            model("hf://org/pickles"),
            r'org/pickles: there is no file "config.json" in it .*correct the id',
        ),
    ],
)
def test_what_the_hub_refuses_is_told(there: Hub, hub_id: HubId, problem: str) -> None:
    there.add("org/pickles").commit(
        {"pytorch_model.bin": b"a pickle", "original/config.json": b"{}"}
    )
    with pytest.raises(ValueError, match=problem) as error:
        fetched(hub_id)
    assert TOKEN not in str(error.value) and "hostile" not in str(error.value)


def test_a_hub_that_is_broken_is_none_and_one_that_refuses_is_obeyed(there: Hub) -> None:
    """huggingface_hub does not retry on the status of this hub.

    `tests/test_hub_run.py` has a status on which it does."""
    there.status = 505
    with pytest.raises(
        hub.HubFailedError, match=r"status 505\), and what is needed is not, or not whole, in the"
    ):
        fetched(model())
    there.status = 0
    folder = fetched(model())
    there.status = 505
    assert fetched(model()) == folder
    there.status = 403
    with pytest.raises(
        ValueError, match=r"hf://org/another: the hub refuses it .*status 403"
    ) as error:
        fetched(model("hf://org/another"))
    assert "hostile" not in str(error.value) and "accept its terms" in str(error.value)


def test_a_hub_that_stalls_ends_within_the_limit(there: Hub) -> None:
    there.stalled = {"model.safetensors"}
    with pytest.raises(
        hub.HubFailedError, match=r"hf://org/model.*not done after 3 s \(run.hub_timeout_seconds\)"
    ):
        fetched(model(), seconds=3.0)


@pytest.mark.parametrize("name", ["model.safetensors", pytest.param("config.json", marks=matrix)])
def test_a_file_that_is_cut_off_is_refused(there: Hub, name: str) -> None:
    there.cut = {name}
    with pytest.raises(hub.HubFailedError, match=r"hf://org/model: the hub cannot be asked"):
        fetched(model())
    there.cut = set()
    assert (fetched(model()) / name).read_bytes() == MODEL[name]


def test_a_client_that_breaks_is_told_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "huggingface_hub.py").write_text("import no_such_module_of_anybody")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        hub.HubFailedError, match=r"the client of the hub ended with 1: .*of_anybody"
    ):
        fetched(model())


# ---------------------------------------------------------------- without a network


def test_the_cache_is_enough_without_the_hub(there: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetched(model())
    rows = fetched(data())
    assert rows.read_bytes() == ROWS and set(there.downloads()) == NEEDED | {"train.jsonl"}
    there.asked.clear()
    for how in ("offline", "no network"):
        cut_off(monkeypatch, how)
        assert fetched(model()) == folder and fetched(data()) == rows
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert there.asked == []


@pytest.mark.parametrize("how", ["offline", pytest.param("no network", marks=matrix)])
def test_without_hub_and_cache_the_command_is_told(
    there: Hub, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (pinned,) = hub.fetch([model()], LIMIT, weights=False).values()
    assert hub.missing_weights(pinned) == len(MODEL["model.safetensors"])
    cut_off(monkeypatch, how)
    # What the user has set stays, a network comes back.
    kind = ValueError if how == "offline" else hub.HubFailedError
    with pytest.raises(
        kind, match=r'Or run "hf download org/rows data/train.jsonl --repo-type dataset"'
    ):
        fetched(data())
    with pytest.raises(kind, match="is not, or not whole, in the cache") as error:
        fetched(model(), recorded=[pinned])
    assert f'run "hf download org/model --revision {pinned.commit}"' in str(error.value)
    assert "with the same HF_HOME, or give a local folder" in str(error.value)


def cut_off(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def test_the_default_that_keeps_libraries_off_the_network_is_not_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {
        name: text
        for name, text in os.environ.items()
        if name not in ("HF_HUB_OFFLINE", "RLMATH_SET_OFFLINE")
    }
    program = (
        "import json, os, rlmath\n"
        "from rlmath.config import hub\n"
        "print(json.dumps([os.environ['HF_HUB_OFFLINE'], "
        "hub.client_environment()['HF_HUB_OFFLINE']]))\n"
    )
    for variables, expected in (
        ({}, ["1", "0"]),
        ({"HF_HUB_OFFLINE": "1"}, ["1", "1"]),
        ({"HF_HUB_OFFLINE": "0"}, ["0", "0"]),
    ):
        process = subprocess.run(
            [sys.executable, "-c", program],
            env=environment | variables,
            capture_output=True,
            text=True,
        )
        assert json.loads(process.stdout) == expected


# ---------------------------------------------------------------- push


def test_a_folder_is_pushed_to_a_private_repository(there: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "hf_model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(MODEL[name])
    commit = hub.push("me/trained", folder, "rlmath: 2 steps", LIMIT)
    repo = there.add("me/trained")
    assert repo.private and repo.branches["main"] == commit
    pushed = {
        name: content for name, content in repo.commits[commit].items() if not name.startswith(".")
    }
    assert pushed == {name: MODEL[name] for name in ("config.json", "model.safetensors")}


def test_a_push_that_is_refused_says_why(
    there: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    there.refuses_commits = True
    with pytest.raises(ValueError, match="status 403"):
        hub.push("me/trained", tmp_path, "message", LIMIT)
    there.silent = True
    with pytest.raises(hub.HubFailedError, match="not done after 1 s"):
        hub.push("me/trained", tmp_path, "message", 1.0)
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrong")
    there.silent = False
    with pytest.raises(ValueError, match="status 401") as error:
        hub.push("me/other", tmp_path, "message", LIMIT)
    assert "hf_wrong" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "variables", "what"),
    [
        (["save.push_to_hub=me"], {}, 'save.push_to_hub is "me"; needed'),
        (["save.push_to_hub=../me"], {}, "needed: the id of a repository"),
        (["save.push_to_hub=me/model", "save.export_hf=false"], {}, "Set save.export_hf=true"),
        (["save.push_to_hub=me/model"], {"HF_TOKEN": ""}, "needs a token of the hub"),
        (["save.push_to_hub=me/model"], {"HF_HUB_OFFLINE": "1"}, "needs a network"),
    ],
)
def test_a_push_that_cannot_be_is_refused_before_the_start(
    there: Hub,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    variables: dict[str, str],
    what: str,
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    base = ["run.output_dir=o", "model.path=m", "data.train_path=t", "save.export_hf=true"]
    (problem,) = hub.push_problems(load_config([], [*base, *settings]).save, True)
    assert what in problem and TOKEN not in problem
