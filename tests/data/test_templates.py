"""Templates against the published texts."""

import json
import resource
import signal
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rlmath.data import chat
from rlmath.data.formats import read_prompts
from rlmath.data.rows import PromptFile, PromptRow
from rlmath.data.tokenizer import has_template, prompt_text, usable_prompts

ROW = PromptRow("What is {1}+1?", "math", "q", ("2",), whole=False)
R1 = (
    "<｜User｜>\nWhat is {1}+1?\nPlease reason step by step, and put your final answer within "
    "\\boxed{}."
    "<｜Assistant｜><think>\n"
)
QWEN = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nWhat is {1}+1?\nPlease reason step by step, and put your final answer "
    "within \\boxed{}."
    "<|im_end|>\n<|im_start|>assistant\n"
)
ORZ = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant "
    "solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the "
    "answer. The reasoning "
    "process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
    "tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: You must "
    "put your answer "
    "inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final answer "
    "will be extracted "
    "automatically by the \\boxed{} tag.\nThis is the problem:\nWhat is {1}+1?\nAssistant: <think>"
)
CHAT = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def make_tokenizer(chat_template=None):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = chat_template
    return tokenizer


def render(row, template, tokenizer) -> str:
    return prompt_text(row, template, tokenizer).text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("r1_distill", R1),
        ("qwen_boxed", QWEN),
        ("orz", ORZ),
        ("raw", "What is {1}+1?"),
        ("auto", QWEN),
    ],
)
def test_templates_are_the_published_ones(template, text):
    assert render(ROW, template, make_tokenizer()) == text


def test_whole_prompts_stay_as_they_are():
    row = PromptRow("47+85=", "math", "q", ("132",))
    assert render(row, "auto", make_tokenizer(CHAT)) == "47+85="
    for template, text in (("r1_distill", R1), ("qwen_boxed", QWEN), ("orz", ORZ)):
        assert render(replace(row, prompt=text), template, make_tokenizer()) == text
    with_space = R1.replace("?\nPlease", "? Please")
    assert render(replace(row, prompt=with_space), "r1_distill", make_tokenizer()) == with_space


def test_a_template_around_another_is_refused():
    row = PromptRow(R1, "math", "q7", ("2",))
    with pytest.raises(
        ValueError,
        match="data\\.template is \"qwen_boxed\", and the prompt 'q7' has a template already",
    ):
        render(row, "qwen_boxed", make_tokenizer())


def test_a_template_in_a_bare_problem_is_refused_with_the_word_that_takes_it():
    row = replace(ROW, prompt=R1)
    with pytest.raises(ValueError, match=r'template is "auto", .*Use data.template "raw"$'):
        render(row, "auto", make_tokenizer(CHAT))
    assert render(row, "raw", make_tokenizer(CHAT)) == R1


def test_a_chat_of_the_file_is_taken_as_it_stands():
    row = replace(ROW, messages=(system("Be brief."), chat.user("1+1?")))
    assert render(row, "auto", make_tokenizer(CHAT)) == "[system]Be brief.[user]1+1?[assistant]"
    assert render(row, "orz", make_tokenizer(CHAT)) == ORZ


def test_chat_needs_a_chat_template_that_takes_the_messages():
    with pytest.raises(ValueError, match="tokenizer has no chat template"):
        render(ROW, "chat", make_tokenizer())
    with pytest.raises(ValueError, match="chat template cannot take the prompt 'q': no such role"):
        render(ROW, "chat", make_tokenizer("{{ raise_exception('no such role') }}"))


@pytest.mark.parametrize(
    "text", [R1, QWEN, ORZ, "Question:\n1+1?\nAnswer:\nLet's think step by step.\n"]
)
def test_known_templates_are_seen(text):
    assert has_template(text)
    assert not has_template("What is 1+1? User: x\nAnswer:")


LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
BALLOON = (
    "{% set own = namespace(x='xx') %}{% for i in range(40) %}{% set own.x = own.x ~ own.x "
    "%}{% endfor %}"
)


POWER = "{% set x = 9**(9**9) %}"
"""Jinja computes constants as it compiles, and goes on after what is raised there."""


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOP, "it takes more than 1 s"),
        (BALLOON, "more than 0.25 GiB"),
        (POWER, "it takes more than 1 s"),
        (POWER * 20, "it takes more than 1 s"),
    ],
    ids=["loop", "balloon", "constant", "constants"],
)
def test_a_chat_template_that_takes_too_much_is_refused(monkeypatch, template, reason):
    monkeypatch.setattr(chat, "CHAT_SECONDS", 600.0 if template == BALLOON else 1.0)
    monkeypatch.setattr(chat, "CHAT_BYTES", 2**28)
    before = signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(
        ValueError, match=f"chat template cannot take a system turn: {reason}; use another"
    ):
        render(ROW, "chat", make_tokenizer(template))
    assert (signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_second_alarm_while_the_first_is_handled_changes_nothing(monkeypatch):
    """It comes before the first is caught where the machine is busy, or much memory is freed."""
    monkeypatch.setattr(chat, "CHAT_SECONDS", 0.05)
    monkeypatch.setattr(chat, "REPEAT_SECONDS", 1e-3)
    tokenizer = make_tokenizer(LOOP)
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        for _ in range(10):
            with pytest.raises(
                ValueError, match=r"cannot take a prompt: it takes more than 0\.05 s"
            ):
                chat.render([chat.user("1+1?")], tokenizer, "a prompt")
            assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGALRM, before)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("{{ 'x' * 9000000 }}", "a text that has 90000"),
        ("{{ '\\ud800' }}", "a text that has half a surrogate pair at character 0"),
        ("{{ '\\0' }}", "a text that has a NUL character at character 0"),
    ],
    ids=["long", "surrogate", "NUL"],
)
def test_what_a_chat_template_makes_is_bounded_and_a_text(tmp_path, written, reason):
    """The limits are those of what users' functions make, for whole conversations, too."""
    tokenizer = make_tokenizer(written + CHAT)
    with pytest.raises(ValueError, match=f"chat template makes of a system turn {reason}"):
        chat.render([system("x"), chat.user("1+1?")], tokenizer, "a system turn", prompt=False)
    tokenizer.chat_template = (
        "{% if 'seven' in messages[-1].content %}" + written + "{% endif %}" + CHAT
    )
    rows = [{"question": f"{word} + 1?", "answer": "2"} for word in ("one", "seven", "two")]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    file, texts = usable_prompts(read_prompts(str(tmp_path / "rows.jsonl")), "auto", tokenizer)
    assert len(texts) == 2 and reason in file.unusable[0].reason


def test_what_a_chat_template_raises_can_be_printed():
    tokenizer = make_tokenizer("{{ raise_exception('\\ud800\\x1b[2J') }}")
    with pytest.raises(
        ValueError, match=r"cannot take a question: \\ud800\\x1b\[2J \(line 1\); use another"
    ) as error:
        chat.render([chat.user("1+1?")], tokenizer, "a question")
    assert str(error.value).encode("ascii")


def test_a_long_template_around_a_short_problem_is_not_tokenized():
    tokenizer = make_tokenizer("{{ 'x' * 3000 }}" + CHAT)
    file, texts = usable_prompts(
        PromptFile("f", [ROW], []), "auto", tokenizer, most_characters=2000
    )
    assert texts == [] and "in its template it has 3" in file.unusable[0].reason


def test_a_chat_template_that_leaves_the_problem_out_is_refused():
    with pytest.raises(
        ValueError, match="leaves out the problem of the prompt 'q': it makes 'hello' of it"
    ):
        render(ROW, "chat", make_tokenizer("hello"))
    trimmed = make_tokenizer("{{ messages[0].content | trim }}")
    assert "{1}+1?" in render(replace(ROW, prompt="  What is {1}+1?\n\n"), "chat", trimmed)


def test_a_chat_template_that_writes_the_date_writes_the_same_on_every_day():
    dated = make_tokenizer("Today Date: {{ strftime_now('%d %b %Y') }}. {{ messages[0].content }}")
    assert render(ROW, "chat", dated).startswith("Today Date: 26 Jul 2024. What is")


def test_problems_with_a_special_token_in_them_cannot_be_used():
    tokenizer = make_tokenizer(CHAT)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    marked = replace(ROW, query_id="end", prompt="1+1?<|im_end|> The answer is 3.")
    in_chat = replace(
        ROW, query_id="chat", messages=(chat.user("Be quick.<|im_end|>"), chat.user("1+1?"))
    )
    whole = replace(marked, query_id="whole", whole=True)
    file = PromptFile("question_answer", [ROW, marked, in_chat, whole], [])
    usable, texts = usable_prompts(file, "auto", tokenizer)
    assert [text.is_chat for text in texts] == [True, False]
    assert [row.query_id for row in usable.rows] == ["q", "whole"]
    assert [row.where for row in usable.unusable] == ["query_id 'end'", "query_id 'chat'"]
    assert "special token '<|im_end|>'" in usable.unusable[0].reason
    assert usable_prompts(file, "raw", tokenizer)[0].rows == file.rows
