"""Sequences for supervised training: their forms, their tokens, what is left out and held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmath.cli.make_tiny_model import make_tokenizer
from rlmath.data.sft_sequences import (
    WrittenSequence,
    load_sequences,
    sequences_fingerprint,
    split_held_out,
)

PROMPT_FORM = {"prompt": "47+85=", "completion": "\\boxed{132}"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def write(path: Path, *rows: object) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


def load(path: str, tokenizer, template: str = "auto", limit: int = 200, share: float = 0.0):
    return load_sequences(path, tokenizer, template, limit, share)


def texts(one: WrittenSequence, tokenizer) -> tuple[str, str]:
    return tokenizer.decode(one.prompt_ids), tokenizer.decode(one.completion_ids)


def test_prompt_and_completion_are_taken_as_they_stand_and_closed(
    tmp_path: Path, tokenizer
) -> None:
    (sequence,), report = load(write(tmp_path / "a.jsonl", PROMPT_FORM), tokenizer)
    assert texts(sequence, tokenizer) == ("47+85=", "\\boxed{132}<eos>")
    assert len(sequence.prompt_ids) == 6 and sequence.completion_ids[-1] == tokenizer.eos_token_id
    assert (report.rows, report.kept, report.dropped) == (1, 1, 0)


def test_an_end_that_is_written_is_not_doubled(tmp_path: Path, tokenizer) -> None:
    for number, completion in enumerate(("2<eos>", "2<eos>\n")):
        (sequence,), _ = load(
            write(tmp_path / f"{number}.jsonl", {"prompt": "1", "completion": completion}),
            tokenizer,
        )
        assert sequence.completion_ids.count(tokenizer.eos_token_id) == 1


def test_messages_need_a_chat_template(tmp_path: Path, tokenizer) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(ValueError, match="need the tokenizer's chat template"):
        load(write(tmp_path / "a.jsonl", row), tokenizer)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "not JSON"),
        ({"prompt": "1+1="}, "has 'prompt'; needed: prompt and completion"),
        ({"prompt": "1+1=", "completion": "  "}, "completion must be a string that is not blank"),
        ({"prompt": "é", "completion": "2"}, "its prompt has no token"),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "the last of its messages must be"),
    ],
)
def test_a_row_that_cannot_be_used_is_left_out_up_to_a_share(
    tmp_path: Path, tokenizer, row: object, why: str
) -> None:
    path = write(tmp_path / "a.jsonl", PROMPT_FORM, row, PROMPT_FORM)
    sequences, report = load(path, tokenizer, share=0.34)
    assert len(sequences) == 2 and len(report.unusable) == 1
    assert why in report.unusable[0].reason and "line 2" in report.unusable[0].where
    assert "  1 row cannot be used and left out" in report.lines()[1]
    with pytest.raises(
        ValueError, match=r"1 of 3 rows cannot be used, more than data.max_unusable_share=0.33"
    ):
        load(path, tokenizer, share=0.33)


def test_longer_ones_are_dropped_and_counted(tmp_path: Path, tokenizer) -> None:
    rows = [{"prompt": "1" * n, "completion": "2"} for n in (3, 4, 5, 9)]
    sequences, report = load(write(tmp_path / "a.jsonl", *rows), tokenizer, limit=6)
    assert [sequence.length for sequence in sequences] == [5, 6]
    assert "dropped: 2 longer than sft.max_sequence_tokens=6" in report.line()
    assert "the longest has 11)" in report.line()
    shares = {"kept": 0.5, "too_long": 0.5, "empty": 0, "repeated": 0, "unusable": 0}
    assert report.record()["shares"] == shares and report.record()["max_sequence_tokens"] == 6


def test_a_file_that_leaves_nothing_says_why(tmp_path: Path, tokenizer) -> None:
    with pytest.raises(ValueError, match="all 1 sequences that can be used are longer than"):
        load(write(tmp_path / "a.jsonl", PROMPT_FORM), tokenizer, limit=6)
    with pytest.raises(ValueError, match="has no rows: its lines are blank"):
        load(write(tmp_path / "b.jsonl"), tokenizer)
    with pytest.raises(ValueError, match="1 of 1 rows cannot be used"):
        load(write(tmp_path / "c.jsonl", {"prompt": "1+1=", "answer": "2"}), tokenizer)
    with pytest.raises(ValueError, match="no row can be used"):
        load(write(tmp_path / "c.jsonl", {"prompt": "1+1=", "answer": "2"}), tokenizer, share=1.0)
    with pytest.raises(ValueError, match="no such file"):
        load(str(tmp_path / "d.jsonl"), tokenizer)


def numbered(count: int) -> list[WrittenSequence]:
    return [WrittenSequence((3,), (number + 3, 1)) for number in range(count)]


def test_what_is_held_out_is_disjoint_and_drawn_by_the_seed() -> None:
    whole = numbered(50)
    train, held_out = split_held_out(whole, 0.1, seed=1)
    assert len(held_out) == 5 and sorted((*train, *held_out), key=whole.index) == whole
    assert (
        split_held_out(whole, 0.1, seed=1)
        == (train, held_out)
        != split_held_out(whole, 0.1, seed=2)
    )
    assert train == sorted(train, key=whole.index)


@pytest.mark.parametrize(
    ("count", "share", "held"), [(50, 0.0, 0), (50, 0.001, 1), (3, 0.99, 2), (1, 0.5, 0)]
)
def test_at_least_one_is_held_out_and_one_left(count: int, share: float, held: int) -> None:
    train, held_out = split_held_out(numbered(count), share, seed=1)
    assert (len(held_out), len(train)) == (held, count - held)


def test_the_fingerprint_tells_sequences_and_their_order_apart() -> None:
    whole = numbered(4)
    names = {
        sequences_fingerprint(whole),
        sequences_fingerprint(whole[::-1]),
        sequences_fingerprint(whole[:3]),
        sequences_fingerprint(
            [WrittenSequence((3, *sequence.completion_ids[:1]), (1,)) for sequence in whole]
        ),
    }
    assert len(names) == 4 and sequences_fingerprint(numbered(4)) in names
