"""Parquet and Arrow files in the forms of SimpleRL-Zoo and DAPO-Math, and data sets' folders."""

import json
import random
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmath.data import tables
from rlmath.data.chat import user
from rlmath.data.formats import read_prompts
from rlmath.data.loader import load_prompts

QWEN = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}\nPlease "
    "reason step by step, "
    "and put your final answer within \\boxed{{}}.<|im_end|>\n<|im_start|>assistant\n"
)
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def simplerl(index=0, content="What is 1+1?", answer="2", **changes):
    return {
        "data_source": "simplelr_qwen",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {
            "answer": answer,
            "index": index,
            "question": "What is 1+1?",
            "split": "train",
        },
    } | changes


def dapo(index="a-b-c", problem="What is 1+1?", answer="2"):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": DAPO.format(problem), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def write(path, rows, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return str(path)


def refused(path):
    with pytest.raises(ValueError) as caught:
        read_prompts(str(path))
    return str(caught.value)


def test_simplerl_prompts_that_hold_a_template_are_whole(tmp_path):
    file = read_prompts(
        write(tmp_path / "train.parquet", [simplerl(content=QWEN.format("What is 1+1?"))])
    )
    (row,) = file.rows
    assert file.form == "simplerl"
    assert row.whole and row.prompt == QWEN.format("What is 1+1?") and row.messages == ()
    assert (row.task, row.query_id, row.solutions) == ("math", "0", ("2",))
    assert json.loads(row.more_json)["ability"] == "math"


def test_simplerl_prompts_without_one_keep_their_chat(tmp_path):
    content = "What is 1+1?\nLet's think."
    system = simplerl(
        index=4,
        prompt=[{"content": "Be brief.", "role": "system"}, {"content": content, "role": "user"}],
    )
    (row,) = read_prompts(write(tmp_path / "train.parquet", [system])).rows
    assert not row.whole and row.query_id == "4"
    assert row.prompt == "What is 1+1?"
    assert row.messages == ({"role": "system", "content": "Be brief."}, user(content))


def test_simplerl_answers_stand_in_several_places(tmp_path):
    rows = [
        simplerl(0, gt_answer=None),
        simplerl(1, reward_model={"ground_truth": None, "style": "rule"}),
        simplerl(2, answer=None, gt_answer="5"),
        simplerl(3, answer=None),
    ]
    file = read_prompts(write(tmp_path / "train.parquet", rows))
    assert [row.solutions for row in file.rows] == [("2",), ("2",), ("5",)]
    assert file.unusable[0].reason.startswith(
        "no answer in reward_model.ground_truth, extra_info.answer"
    )
    assert file.unusable[0].where.endswith("train.parquet, row 4")


def test_dapo_rows_that_repeat_are_counted_apart(tmp_path):
    rows = [dapo("a", "What is 1+1?"), dapo("b", "What is\n\n2+2?", "4")] * 100
    file = read_prompts(write(tmp_path / "dapo-math-17k.parquet", rows))
    assert (file.form, len(file.rows), file.repeated, file.unusable) == ("dapo", 2, 198, [])
    assert [(row.query_id, row.prompt, row.solutions) for row in file.rows] == [
        ("a", "What is 1+1?", ("2",)),
        ("b", "What is\n\n2+2?", ("4",)),
    ]
    assert file.rows[0].messages == (user(DAPO.format("What is 1+1?")),)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "prompt must be a list of 1 to 100 messages"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "the last message of prompt must",
        ),
    ],
)
def test_chats_that_cannot_be_used_are_left_out(tmp_path, prompt, reason):
    file = read_prompts(write(tmp_path / "t.parquet", [simplerl(0), simplerl(1, prompt=prompt)]))
    assert [row.reason.startswith(reason) for row in file.unusable] == [True]


def test_a_text_that_is_not_utf8_costs_its_row_only(tmp_path):
    texts = pa.array([b"1+1?", b"\xff\xfe", b"2+2?"]).cast(pa.binary()).view(pa.binary())
    questions = pa.Array.from_buffers(pa.string(), 3, texts.buffers())
    table = pa.table({"question": questions, "answer": [2, 3, 4], "day": [date(2025, 1, 1)] * 3})
    pq.write_table(table, tmp_path / "t.parquet")
    file = read_prompts(str(tmp_path / "t.parquet"))
    assert [row.prompt for row in file.rows] == ["1+1?", "2+2?"]
    assert "a value that cannot be read" in file.unusable[0].reason and file.unusable[
        0
    ].where.endswith("row 2")
    assert json.loads(file.rows[0].more_json)["day"] == "2025-01-01"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_wrong_bytes_anywhere_cost_rows_or_the_file_and_nothing_else(tmp_path, kind):
    table = pa.Table.from_pylist([simplerl(index) for index in range(60)])
    file = tmp_path / f"t.{kind}"
    if kind == "parquet":
        pq.write_table(table, file, row_group_size=20)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=20)
    content = file.read_bytes()
    outcomes = set()
    for seed in range(100):
        chance = random.Random(seed)
        wrong = bytearray(content)
        for _ in range(chance.choice([1, 3, 20])):
            wrong[chance.randrange(len(wrong))] = chance.randrange(256)
        file.write_bytes(wrong)
        try:
            outcomes.add(len(read_prompts(str(file)).rows) <= 60)
        except ValueError as error:
            outcomes.add(str(file) in str(error) and "refused")
    assert outcomes == {True, "refused"}


def test_an_enormous_batch_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_MAX_BATCH_BYTES", 2**20)
    path = write(
        tmp_path / "t.parquet", [{"question": "x" * 2**16, "answer": str(n)} for n in range(20)]
    )
    assert "take 0.0 GiB; prompts of a few KiB are needed" in refused(path)


# ---------------------------------------------------------------- folders


def shards(folder, split, counts):
    start = 0
    for number, count in enumerate(counts):
        rows = [simplerl(index) for index in range(start, start + count)]
        write(folder / f"{split}-{number:05d}-of-{len(counts):05d}.parquet", rows)
        start += count


def test_a_downloaded_folder_gives_its_training_split_in_the_order_of_its_shards(tmp_path):
    shards(tmp_path / "data", "test", [2])
    shards(tmp_path / "data", "train", [3, 1, 2])
    (tmp_path / "README.md").write_text("a data set")
    file = read_prompts(str(tmp_path))
    assert [row.query_id for row in file.rows] == ["0", "1", "2", "3", "4", "5"]
    (tmp_path / "data" / "train-00001-of-00003.parquet").unlink()
    assert "2 of 3 files train-...; download all of them" in refused(tmp_path)


def test_which_files_of_a_folder_are_read_is_said(tmp_path):
    for name in ("train-00000-of-00001.parquet", "other_0.parquet"):
        write(tmp_path / name, [simplerl(0)])
    expected = f"{tmp_path} is a folder; read: train-00000-of-00001.parquet."
    _, report = load_prompts(str(tmp_path), None, 100)
    assert report.lines()[0] == expected
    assert load_prompts(str(tmp_path / "other_0.parquet"), None, 100)[1].files == ""


def test_a_folder_with_several_files_asks_for_one(tmp_path):
    for name in ("boba_106k_0319.jsonl", "orz-zero_56k_0319.jsonl"):
        (tmp_path / name).write_text("{}")
    assert (
        "has several files of prompts (boba_106k_0319.jsonl, orz-zero_56k_0319.jsonl); give one"
        in refused(tmp_path)
    )
    write(tmp_path / "both" / "train.parquet", [simplerl(0)])
    (tmp_path / "both" / "train.jsonl").write_text("{}")
    assert "several files of prompts (train.jsonl, train.parquet)" in refused(tmp_path / "both")
    (tmp_path / "empty").mkdir()
    assert "a folder without prompts" in refused(tmp_path / "empty")


def test_shards_with_a_hash_or_a_number_alone_are_one_split(tmp_path):
    for number in range(2):
        write(tmp_path / "hash" / f"train-0000{number}-of-00002-0a1b2c.parquet", [simplerl(number)])
        write(tmp_path / "number" / "train" / f"000{number}.parquet", [simplerl(number)])
    for folder in ("hash", "number"):
        assert [row.query_id for row in read_prompts(str(tmp_path / folder)).rows] == ["0", "1"]
    (tmp_path / "hash" / "train-00001-of-00002-0a1b2c.parquet").unlink()
    assert "1 of 2 files train-...; download all of them" in refused(tmp_path / "hash")


def test_a_data_set_of_several_configurations_names_their_folders(tmp_path):
    for name in ("main/test", "main/train", "socratic/train", ".cache/train"):
        write(tmp_path / f"{name}-00000-of-00001.parquet", [simplerl(0)])
    assert "Give one of the folders in it that have some: main, socratic" in refused(tmp_path)


@pytest.mark.parametrize(
    "state", ["[]", '{"_data_files": 5}', '{"_data_files": [{"filename": "../x.arrow"}]}', "{"]
)
def test_a_state_that_names_no_files_is_refused(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    assert "state.json" in refused(tmp_path)


def save_to_disk(folder, rows, files=("data-00000-of-00001.arrow",)):
    """Write what `datasets` writes: Arrow streams, state.json and dataset_info.json."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    rows_per_file = -(-len(rows) // len(files))
    for number, name in enumerate(files):
        with (
            pa.OSFile(str(folder / name), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as stream,
        ):
            stream.write_table(table.slice(number * rows_per_file, rows_per_file), max_chunksize=2)
    state = {
        "_data_files": [{"filename": name} for name in files],
        "_split": "train",
        "_fingerprint": "0",
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_what_save_to_disk_left_is_read(tmp_path):
    names = ("data-00000-of-00002.arrow", "data-00001-of-00002.arrow")
    save_to_disk(tmp_path / "set" / "train", [simplerl(index) for index in range(5)], names)
    save_to_disk(tmp_path / "set" / "test", [simplerl(99)])
    (tmp_path / "set" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for folder in (tmp_path / "set", tmp_path / "set" / "train"):
        assert [row.query_id for row in read_prompts(str(folder)).rows] == ["0", "1", "2", "3", "4"]
    (tmp_path / "set" / "train" / names[1]).unlink()
    assert f"they are not there ({names[1]})" in refused(tmp_path / "set")


def test_arrow_files_are_read_and_damaged_ones_refused(tmp_path):
    table = pa.Table.from_pylist([dapo()])
    with (
        pa.OSFile(str(tmp_path / "t.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as file,
    ):
        file.write_table(table)
    assert read_prompts(str(tmp_path / "t.arrow")).form == "dapo"
    content = (tmp_path / "t.arrow").read_bytes()
    (tmp_path / "cut.arrow").write_bytes(content[: len(content) // 2])
    assert "download it again" in refused(tmp_path / "cut.arrow")
    (tmp_path / "empty.arrow").write_bytes(b"")
    assert "download it again" in refused(tmp_path / "empty.arrow")


def test_a_number_is_written_by_the_shortest_text_of_its_own_type(tmp_path):
    for kind in (pa.float64(), pa.float32(), pa.float16()):
        rows = {
            "problem": ["1/10?"],
            "answer": pa.array([0.1], kind),
            "whole": pa.array([whole := 2.0 if kind == pa.float16() else 123456792.0], kind),
            "more": pa.array([{"rates": [0.3, None]}], pa.struct([("rates", pa.list_(kind))])),
        }
        pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
        (row,) = read_prompts(str(tmp_path / "rows.parquet")).rows
        assert row.solutions == ("0.1",)
        assert json.loads(row.more_json) == {
            "answer": 0.1,
            "whole": whole,
            "more": {"rates": [0.3, None]},
        }


def test_columns_of_no_form_are_told_what_to_change(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"problem": "1+1?", "ground_truth": "2"}\n')
    assert "'ground_truth'. Needed: JSON lines, parquet or Arrow" in refused(tmp_path / "t.jsonl")
