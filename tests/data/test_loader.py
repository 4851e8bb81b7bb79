import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlmath.algorithms.types import Prompt
from rlmath.data import loader
from rlmath.data.loader import (
    DroppedPrompt,
    FilterReport,
    dropped_share,
    load_prompts,
    write_report,
)
from rlmath.data.order import PromptOrder, Share, permutation
from rlmath.data.rows import UnusableRow, unusable_lines
from rlmath.data.tokenizer import FIXED
from rlmath.evals.benchmarks import load_benchmark


@pytest.fixture(scope="module")
def tokenizer():
    """One token per word, and a beginning-of-sequence token (0) that it adds by default."""
    words = Tokenizer(
        models.WordLevel({"<bos>": 0, "<unk>": 1, "one": 2, "two": 3}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", unk_token="<unk>")


def write(tmp_path, prompts):
    path = tmp_path / "train.jsonl"
    rows = [
        {"prompt": prompt, "task": "math", "query_id": f"q{number}", "solutions": ["1"]}
        for number, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_longer_in_tokens_are_dropped_and_counted(tmp_path, tokenizer):
    path = write(
        tmp_path, ["one two", "a-single-word-of-many-characters", "one one one", "one two one two"]
    )
    prompts, report = load_prompts(path, tokenizer, max_prompt_tokens=3)
    assert prompts == [
        Prompt("q0", "one two", (0, 2, 3), ("1",), "math"),
        Prompt("q1", "a-single-word-of-many-characters", (0, 1), ("1",), "math"),
    ]
    assert report.first_row is not None and report.first_row.prompt == "one two"
    assert replace(report, first_row=None) == FilterReport(
        read=4,
        kept=2,
        dropped_too_long=2,
        longest_dropped_tokens=5,
        most_tokens=3,
        path=path,
        form="boba",
        examples=(
            DroppedPrompt("q2", 4, "too long", "one one one"),
            DroppedPrompt("q3", 5, "too long", "one two one two"),
        ),
        template="raw",
    )
    assert dropped_share([report, replace(report, dropped_too_long=0, kept=4)]) == 0.25


def test_the_question_is_the_problem_without_its_template(tmp_path, tokenizer):
    texts = [FIXED["qwen_boxed"].render("How many eggs?"), "How many ducks?"]
    prompts, _ = load_prompts(write(tmp_path, texts), tokenizer, max_prompt_tokens=99)
    assert [prompt.question for prompt in prompts] == ["How many eggs?", "How many ducks?"]
    plain = tmp_path / "plain.jsonl"
    plain.write_text(json.dumps({"question": "How many cows?", "answer": "1"}) + "\n")
    (rendered,), _ = load_prompts(str(plain), tokenizer, max_prompt_tokens=99, template="orz")
    assert rendered.question == "How many cows?" and rendered.text == FIXED["orz"].render(
        "How many cows?"
    )
    benchmark = load_benchmark("plain", plain, tokenizer, "orz")
    assert [problem.question for problem in benchmark.problems] == ["How many cows?"]


def test_prompts_without_any_token_are_dropped_and_counted(tmp_path):
    bare = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={"o": 0, "n": 1, "e": 2}, merges=[]))
    )
    prompts, report = load_prompts(
        write(tmp_path, ["one", "\u4f60", "\u597d"]), bare, max_prompt_tokens=3
    )
    assert [prompt.token_ids for prompt in prompts] == [(0, 1, 2)]
    assert report.dropped_empty == 2 and report.dropped_too_long == 0
    assert "2 without any token" in report.line() and "1 kept" in report.line()


def test_chunks_do_not_change_the_prompts(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path, ["one", "two", "one two", "one one one", "two two"])
    whole = load_prompts(path, tokenizer, max_prompt_tokens=3)
    monkeypatch.setattr(loader, "_CHUNK", 2)
    assert load_prompts(path, tokenizer, max_prompt_tokens=3) == whole


def test_a_file_of_which_nothing_is_left_is_refused(tmp_path, tokenizer):
    with pytest.raises(
        ValueError, match=r"all 2 prompts are longer than .*=1 tokens \(the longest has 3\)"
    ):
        load_prompts(write(tmp_path, ["one", "one two"]), tokenizer, max_prompt_tokens=1)


def test_in_file_order_the_steps_follow_each_other_and_the_remainder_is_left_out():
    order = PromptOrder(n_prompts=7, prompts_per_step=3, seed=1, shuffle=False)
    assert order.steps_per_epoch == 2
    assert [order.batch(step) for step in range(4)] == [
        (0, [0, 1, 2]),
        (0, [3, 4, 5]),
        (1, [0, 1, 2]),
        (1, [3, 4, 5]),
    ]
    assert "the 1 that fill no whole step are left out" in order.line()


def test_draws_are_the_places_of_all_steps_one_behind_the_other():
    order = PromptOrder(7, 3, seed=5, shuffle=True)
    for draw in range(20):
        step, index, before = order.drawn(draw)
        assert step == draw // 3 and order.batch(step)[1][draw % 3] == index and before == 0
    # The second file's prompt comes twice an epoch, and here twice in a step.
    twice = PromptOrder(2, 3, seed=1, shuffle=False, shares=(Share(1, 1.0), Share(1, 2.0)))
    assert [twice.drawn(draw) for draw in range(3)] == [(0, 0, 0), (0, 1, 0), (0, 1, 1)]


def test_the_permutation_is_that_of_sha256():
    # sha256sum of 7:0:0 begins with f270, of 7:0:1 with 9ebb, of 7:0:2 with ad5c, of 7:0:3 with
    # 316e
    assert permutation(4, 7, 0) == (3, 1, 2, 0)


def test_more_prompts_a_step_than_there_are_is_refused():
    with pytest.raises(ValueError, match="prompts_per_step is 8, but only 7 prompts"):
        PromptOrder(7, 8, seed=1, shuffle=True)
    with pytest.raises(ValueError, match="must be at least 1"):
        PromptOrder(7, 0, seed=1, shuffle=True)


def test_extra_prompts_are_all_the_others_in_an_order_of_the_step():
    order = PromptOrder(n_prompts=30, prompts_per_step=6, seed=2, shuffle=True)
    extra = [list(order.extra(step)) for step in (0, 1)]
    for step, indices in enumerate(extra):
        assert sorted(indices + order.batch(step)[1]) == list(range(30))
        assert indices == list(order.extra(step))
    common = set(extra[0]) & set(extra[1])
    assert [i for i in extra[0] if i in common] != [i for i in extra[1] if i in common]
    assert extra[0] != list(PromptOrder(30, 6, seed=3, shuffle=True).extra(0))


def test_a_template_that_writes_the_beginning_of_sequence_does_not_double_it(tmp_path, tokenizer):
    prompts, _ = load_prompts(
        write(tmp_path, ["<bos>one two", "two"]), tokenizer, max_prompt_tokens=3
    )
    assert [prompt.token_ids for prompt in prompts] == [(0, 2, 3), (0, 3)]


def test_more_unusable_rows_than_the_share_end_the_run(tmp_path, tokenizer):
    path = write(tmp_path, ["one"] * 19)
    with open(path, "a") as file:
        file.write("not JSON\n")
    prompts, report = load_prompts(path, tokenizer, 3, max_unusable_share=0.05)
    assert len(prompts) == 19 and [row.where for row in report.unusable] == [f"{path}, line 20"]
    with pytest.raises(
        ValueError,
        match=r"1 of 20 rows cannot be used, more than .*=0\.04[^$]*\n    1: not JSON .*line 20",
    ):
        load_prompts(path, tokenizer, 3, max_unusable_share=0.04)


def test_the_report_is_written_with_shares_examples_and_unusable_rows(tmp_path):
    row = UnusableRow("f, line 2", "not JSON (...)", "x")
    example = DroppedPrompt("q", 9, "too long", "one")
    report = FilterReport(
        8, 6, 2, 9, 5, path="f", form="boba", repeated=1, unusable=(row,), examples=(example,)
    )
    write_report(tmp_path, [report, FilterReport(8, 8, 0, 0, 5, path="g", form="dapo")])
    written = json.loads((tmp_path / "data_report.json").read_text())
    assert (written["prompts"], written["dropped_share"]) == (14, 2 / 16)
    first = written["files"][0]
    assert (first["path"], first["format"], first["rows"]) == ("f", "boba", 10)
    assert first["shares"] == {
        "kept": 0.6,
        "too_long": 0.2,
        "empty": 0,
        "repeated": 0.1,
        "unusable": 0.1,
    }
    assert first["examples_dropped"] == [
        {"prompt_id": "q", "tokens": 9, "reason": "too long", "start": "one"}
    ]
    lines = (tmp_path / "unusable_rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"where": "f, line 2", "reason": "not JSON (...)", "start": "x"}
    ]
    text = "\n".join(report.lines())
    assert (
        "'q', which begins 'one'" in text
        and "1 further row repeating" in text
        and "\n    1: not JSON (...) (line 2)" in text
    )


def test_rows_that_cannot_be_used_are_told_by_kinds_of_reason():
    """Reasons that differ only in what they quote are one kind; the most frequent comes first."""
    rows = [UnusableRow("f, line 1", "not JSON (Expecting value)", "x")]
    rows += [
        UnusableRow(f"f, line {n}", f"prompt must be a string, got int '{n}'", "")
        for n in range(2, 9)
    ]
    rows += [UnusableRow("f, line 9", "blank", ""), UnusableRow("f, line 10", "too deep", "")]
    assert unusable_lines("f", rows) == [
        "7: prompt must be a string, got int '2' (line 2, line 3, line 4, ...)",
        "1: not JSON (Expecting value) (line 1)",
        "1: blank (line 9)",
        "1 for other reasons",
    ]
