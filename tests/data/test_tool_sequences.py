"""Supervised sequences with calls of tools: what is learned, and that outputs are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rlmath.config.length_curriculum import BOUNDARY_TOKENS
from rlmath.config.schema import DataConfig
from rlmath.data.audit import audit_sequences, sequence_lines
from rlmath.data.chat import MOST_OBJECTS, ChatSettings, render, set_template
from rlmath.data.columns import messages_of
from rlmath.data.packing import pack
from rlmath.data.sft_sequences import SequenceReport, WrittenSequence, load_sequences
from rlmath.data.tool_fences import FenceFormat, most_output_characters
from rlmath.sandbox.shown import shown_text
from tests.data.chat_templates import chat_tokenizer
from tests.data.test_tool_fences import TOKENIZERS, first_complete, tokenizer_of

CODE = 'print("2 < 3", {"é": 6 * 7})'
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "python", "arguments": json.dumps({"code": CODE, "n": None})},
}
TOOLS = [{"type": "function", "function": {"name": "python", "parameters": {"code": "string"}}}]
ASKED = {"role": "user", "content": "6 x 7?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
OUTPUT = {"role": "tool", "content": "42", "tool_call_id": "call12345"}
ANSWER = {"role": "assistant", "content": "It is 42."}
MESSAGES = [ASKED, CALLED, OUTPUT, ANSWER]
ARGUMENTS = '{"code": "print(\\"2 < 3\\", {\\"é\\": 6 * 7})", "n": null}'


def load(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rows: list[dict], fences: Any = None
) -> tuple[list[WrittenSequence], SequenceReport]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_sequences(
        str(path), tokenizer, "auto", limit=2000, max_unusable_share=1.0, fences=fences
    )


def reason(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: dict, fences: Any = None
) -> str:
    """Why a row cannot be used."""
    usable = {"prompt": "1+1=", "completion": "2"}
    sequences, report = load(tmp_path, tokenizer, [usable, row], fences)
    assert len(sequences) == 1
    assert report.unusable[0].where.endswith("rows.jsonl, line 2")
    return report.unusable[0].reason


def runs(sequence: WrittenSequence, tokenizer: PreTrainedTokenizerFast) -> list[tuple[bool, str]]:
    """(whether it is learned, text) of the completion's runs of tokens."""
    learned = sequence.learned or (True,) * len(sequence.completion_ids)
    token_runs: list[tuple[bool, list[int]]] = []
    for token, is_learned in zip(sequence.completion_ids, learned, strict=True):
        if not token_runs or token_runs[-1][0] != is_learned:
            token_runs.append((is_learned, []))
        token_runs[-1][1].append(token)
    return [(is_learned, tokenizer.decode(run)) for is_learned, run in token_runs]


# ---------------------------------------------------------------- chat templates


HERMES_CALL = f'<tool_call>\n{{"name": "python", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>'
HERMES_OUTPUT = (
    "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
LLAMA_CALL = f'{{"name": "python", "parameters": {ARGUMENTS}}}'
LLAMA_OUTPUT = (
    '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
EXPECTED = {
    "qwen2.5-tools": [HERMES_CALL, HERMES_OUTPUT, "It is 42.<|im_end|>"],
    "qwen3-tools": [HERMES_CALL, HERMES_OUTPUT, "<think>\n\n</think>\n\nIt is 42.<|im_end|>"],
    "llama3-tools": [LLAMA_CALL + "<|eot_id|>", LLAMA_OUTPUT, "It is 42.<|eot_id|>"],
    "mistral-tools": [
        f'[TOOL_CALLS][{{"name": "python", "arguments": {ARGUMENTS}}}]</s>',
        '[TOOL_RESULTS]{"content": 42, "call_id": "call12345"}[/TOOL_RESULTS]',
        " It is 42.</s>",
    ],
}


def with_arguments(arguments: Any) -> list[dict]:
    """MESSAGES with a call of these arguments, in the place of a JSON text."""
    function = {"name": "python", "arguments": arguments}
    return [ASKED, {**CALLED, "tool_calls": [{**CALL, "function": function}]}, OUTPUT, ANSWER]


@pytest.mark.parametrize("name", EXPECTED)
def test_calls_and_answers_are_learned_and_outputs_are_not(name: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(name)
    as_object = with_arguments(json.loads(CALL["function"]["arguments"]))
    as_texts = [{**turn} for turn in MESSAGES]
    as_texts[1]["tool_calls"] = json.dumps([CALL])
    without_wrapper = [{**turn} for turn in MESSAGES]
    without_wrapper[1]["tool_calls"] = [{"id": CALL["id"], **CALL["function"]}]
    empty_calls = [ASKED, {**CALLED, "content": ""}, OUTPUT, {**ANSWER, "tool_calls": []}]
    del as_texts[1]["content"]
    rows = [
        {"messages": messages, "tools": TOOLS}
        for messages in (MESSAGES, as_object, as_texts, without_wrapper, empty_calls)
    ]
    sequences, report = load(tmp_path, tokenizer, rows)
    assert report.unusable == ()
    assert len(sequences) == 5 and len(set(sequences)) == 1
    call, output, answer = EXPECTED[name]
    assert runs(sequences[0], tokenizer) == [(True, call), (False, output), (True, answer)]
    whole = tokenizer.apply_chat_template(as_object, tools=TOOLS, tokenize=False)
    ids = [*sequences[0].prompt_ids, *sequences[0].completion_ids]
    assert tokenizer.decode(ids) == whole.rstrip("\n")
    prompt = tokenizer.apply_chat_template(
        [ASKED], tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert list(sequences[0].prompt_ids) == prompt and '"code"' in tokenizer.decode(prompt)


def test_several_calls_outputs_and_questions(tmp_path: Path) -> None:
    """Outputs that follow each other are one turn; thinking of earlier questions is taken out."""
    second = {"function": {"name": "python", "arguments": '{"code": "1"}'}}
    thought = {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
    calling = {**thought, "tool_calls": [CALL, second]}
    messages = [ASKED, calling, OUTPUT, {"role": "tool", "content": "1"}, thought]
    tokenizer = chat_tokenizer("qwen3-tools")
    (single, several), report = load(
        tmp_path, tokenizer, [{"messages": messages}, {"messages": [*messages, *MESSAGES]}]
    )
    assert report.unusable == ()
    thinking = "<think>\nHm.\n</think>\n\nSo."
    second_call = '\n<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>'
    outputs = HERMES_OUTPUT.replace(
        "</tool_response>", "</tool_response>\n<tool_response>\n1\n</tool_response>"
    )
    assert runs(single, tokenizer) == [
        (True, f"{thinking}\n{HERMES_CALL.removesuffix('<|im_end|>')}{second_call}<|im_end|>"),
        (False, outputs),
        (True, f"{thinking}<|im_end|>"),
    ]
    assert [text for is_learned, text in runs(several, tokenizer) if is_learned] == [
        HERMES_CALL,
        "<think>\n\n</think>\n\nIt is 42.<|im_end|>",
    ]


def test_the_end_of_a_call_is_learned_where_it_is_another_than_of_answers(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("llama3-tools")
    set_template(tokenizer, ChatSettings(kwargs=["builtin_tools=true"]), "here")
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": MESSAGES}])
    assert runs(sequence, tokenizer) == [
        (True, LLAMA_CALL + "<|eom_id|>"),
        (False, LLAMA_OUTPUT),
        (True, "It is 42.<|eot_id|>"),
    ]


def test_a_call_has_weight_0_where_its_row_says_so(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen2.5-tools")
    messages = [ASKED, {**CALLED, "weight": 0}, OUTPUT, ANSWER]
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": messages}])
    assert runs(sequence, tokenizer) == [(True, "It is 42.<|im_end|>")]
    assert tokenizer.decode(sequence.prompt_ids).endswith(HERMES_CALL + HERMES_OUTPUT)


@pytest.mark.parametrize(
    "written",
    [
        "{{ '\"arguments\": ' + c.arguments }}",
        "{{ '\"arguments\": ' ~ c.arguments }}",
        "{{ '\"arguments\": ' }}{{ c.arguments if c.arguments is string else 'none' }}",
    ],
    ids=["concatenated", "printed", "left-out"],
)
def test_a_template_that_takes_texts_gets_texts(written: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen2.5-tools")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}{% set c = call.function %}{{ c.name }} "
        + written
        + "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = with_arguments({"code": CODE})
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": messages}])
    call = json.dumps({"code": CODE}, ensure_ascii=False)
    assert runs(sequence, tokenizer)[0] == (True, f'python "arguments": {call}<|im_end|>')
    in_quotes = tokenizer.chat_template.replace(written, "{{ c.arguments | string | tojson }}")
    tokenizer.chat_template = in_quotes
    assert "leaves out the call" in reason(tmp_path, tokenizer, {"messages": messages})


@pytest.mark.parametrize(
    "written",
    [
        "{{ m.content }}",
        "{{ '' if m.content is none else raise_exception('') if m.tool_calls else m.content }}",
    ],
)
def test_a_content_of_nothing_is_blank_or_null(written: str, tmp_path: Path) -> None:
    """Never does a template write "None" that the model would learn."""
    tokenizer = chat_tokenizer("qwen2.5-tools")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + written
        + "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": MESSAGES}])
    call = f'{{"name": "python", "arguments": {ARGUMENTS}}}<|im_end|>'
    assert runs(sequence, tokenizer)[0] == (True, call)


def test_arguments_may_be_written_one_by_one(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen2.5-tools")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}<function={{ call.function.name }}>"
        "{% for name, value in call.function.arguments.items() %}<{{ name }}>\n{{ value if value "
        "is string else value | tojson }}\n</{{ name }}>{% endfor %}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.chat_template = template
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": MESSAGES}])
    call = f"<function=python><code>\n{CODE}\n</code><n>\nnull\n</n><|im_end|>"
    assert runs(sequence, tokenizer)[0] == (True, call)
    tokenizer.chat_template = template.replace("value if value", "'x' if value")
    assert "leaves out the call" in reason(tmp_path, tokenizer, {"messages": MESSAGES})


@pytest.mark.parametrize(
    ("name", "messages", "told"),
    [
        (
            "smollm3",
            MESSAGES,
            [
                "leaves out the call of the sequence",
                "needed are the name 'python' and behind it the arguments {\"code\": ",
                "give as data.chat_template one that writes tool_calls",
            ],
        ),
        ("qwen2.5", MESSAGES, ["leaves out the call"]),
        ("mistral", MESSAGES, ["only user and assistant", "as data.chat_template one that writes"]),
        ("mistral-tools", [ASKED, {**CALLED, "tool_calls": [{**CALL, "id": "1"}]}], ["nine"]),
        ("llama3-tools", [ASKED, {**CALLED, "tool_calls": [CALL, CALL]}], ["one call in a turn"]),
        (
            "llama3-tools",
            [ASKED, {**CALLED, "content": "So:"}, OUTPUT, ANSWER],
            ["leaves out the text beside a call of the sequence", "or write calls as fences"],
        ),
        (
            "qwen2.5-tools",
            [ASKED, {**CALLED, "reasoning_content": "Hm."}, OUTPUT, ANSWER],
            ["leaves out the reasoning_content beside a call", "take reasoning_content out"],
        ),
    ],
)
def test_what_a_template_cannot_write_is_told(
    name: str, messages: list[dict], told: list[str], tmp_path: Path
) -> None:
    explanation = reason(tmp_path, chat_tokenizer(name), {"messages": messages})
    assert all(part in explanation for part in told), explanation


def test_a_call_that_is_left_out_is_noticed_beside_the_same_in_the_tools(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("smollm3")
    arguments = {"code": "string"}
    tokenizer.chat_template = tokenizer.chat_template.replace("xml_tools", "tools")
    row = {"messages": with_arguments(arguments), "tools": TOOLS}
    assert "leaves out the call" in reason(tmp_path, tokenizer, row)
    row["messages"][1]["content"] = '<tool_call>{"name": "python", "arguments": {"code": "1"}}'
    assert "leaves out the call" in reason(tmp_path, tokenizer, row)
    in_text = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    messages = [ASKED, {"role": "assistant", "content": in_text}, OUTPUT, ANSWER]
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": messages, "tools": TOOLS}])
    assert runs(sequence, tokenizer) == [
        (True, f"{in_text}<|im_end|>"),
        (False, "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n"),
        (True, "It is 42.<|im_end|>"),
    ]


def test_a_call_that_its_prompt_does_not_lead_to_is_told(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen3-tools")
    set_template(tokenizer, ChatSettings(kwargs=["enable_thinking=false"]), "here")
    explanation = reason(tmp_path, tokenizer, {"messages": MESSAGES})
    assert "writes the call in turn 2 of the sequence" in explanation
    assert "or give the turn weight 0" in explanation
    weightless = [ASKED, {**CALLED, "weight": 0}, OUTPUT, ANSWER]
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": weightless}])
    assert runs(sequence, tokenizer) == [(True, "It is 42.<|im_end|>")]


def test_a_changed_call_does_not_reach_to_the_end_of_its_output(tmp_path: Path) -> None:
    """A call whose end is another than that of answers, and that the template changes later."""
    tokenizer = chat_tokenizer("qwen3-tools")
    ends = "{% endfor %}{{ '<|eom_id|>' if m.tool_calls else '<|im_end|>' }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{% endfor %}<|im_end|>", ends)
    told = reason(tmp_path, tokenizer, {"messages": MESSAGES})
    assert "writes the call in turn 2 of the sequence" in told
    thoughtful = [ASKED, {**CALLED, "reasoning_content": "Hm."}, OUTPUT, ANSWER]
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": thoughtful}])
    call = f"<think>\nHm.\n</think>\n\n{HERMES_CALL.replace('<|im_end|>', '<|eom_id|>')}"
    assert runs(sequence, tokenizer)[:2] == [(True, call), (False, HERMES_OUTPUT)]


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ("x", "tool_calls is a text that is not JSON"),
        ({"a": 1}, "tool_calls must be a list of calls, got dict"),
        ([{"function": {"arguments": "{}"}}], "needs a function with its name"),
        (["python"], "needs a function with its name and arguments, got str"),
        ([{"name": "f", "arguments": "{"}], "the arguments of the call of 'f' is a text that"),
        ([{"name": "f", "arguments": "[1]"}], "must be a JSON object, or the text of one, got lis"),
        ([{"name": "f", "arguments": '{"x": NaN}'}], "have a number that is not finite"),
        ([{"name": "f", "arguments": {"x": [1e400]}}], "have a number that is not finite"),
    ],
)
def test_calls_that_are_none_are_told(calls: Any, told: str, tmp_path: Path) -> None:
    messages = [ASKED, {**CALLED, "tool_calls": calls}, OUTPUT, ANSWER]
    assert told in reason(tmp_path, chat_tokenizer("qwen2.5-tools"), {"messages": messages})


def test_others_do_not_call(tmp_path: Path) -> None:
    messages = [{**ASKED, "tool_calls": [CALL]}, ANSWER]
    told = reason(tmp_path, chat_tokenizer("qwen2.5-tools"), {"messages": messages})
    assert told.startswith("a message of 'user' has tool_calls")


def test_tables_have_calls_too(tmp_path: Path) -> None:
    """Arguments are structs, which have the names of all rows, or texts."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    tokenizer = chat_tokenizer("qwen2.5-tools")
    with_code = with_arguments({"code": CODE})
    with_steps = with_arguments({"steps": [1, 2]})
    as_texts = [
        [{**turn, "tool_calls": json.dumps(turn.get("tool_calls"))} for turn in messages]
        for messages in (with_code, with_steps)
    ]
    (first, second), _ = load(
        tmp_path, tokenizer, [{"messages": with_code}, {"messages": with_steps}]
    )
    for number, conversations in enumerate(([with_code, with_steps], as_texts)):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"messages": conversations}), path)
        sequences, _ = load_sequences(
            str(path), tokenizer, "auto", limit=2000, max_unusable_share=0.0
        )
        assert sequences == [first, second]


def test_null_arguments_of_tables_are_left_out_also_where_they_are_named_content(
    tmp_path: Path,
) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    tokenizer = chat_tokenizer("qwen2.5-tools")
    conversations = [with_arguments({"code": "1"}), with_arguments({"content": "1"})]
    pq.write_table(pa.table({"messages": conversations}), tmp_path / "rows.parquet")
    sequences, _ = load_sequences(
        str(tmp_path / "rows.parquet"), tokenizer, "auto", limit=2000, max_unusable_share=0.0
    )
    expected, _ = load(tmp_path, tokenizer, [{"messages": turns} for turns in conversations])
    assert sequences == expected


# ---------------------------------------------------------------- forms of calls


def calls_written(written: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose template writes calls so, `c` being the function."""
    tokenizer = chat_tokenizer("qwen2.5-tools")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}{% set c = call.function %}"
        + written
        + "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


ONE_BY_ONE = (
    "{{ c.name }}{% for name, value in c.arguments | dictsort %}<{{ name }}>{{ value }}{% endfor %}"
)


def test_a_template_that_takes_texts_gets_those_of_the_row(tmp_path: Path) -> None:
    tokenizer = calls_written("{{ c.name ~ ' ' }}{{ '' + c.arguments }}")
    arguments = '{"x":  0.10, "y": "\\u00e9"}'
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": with_arguments(arguments)}])
    assert runs(sequence, tokenizer)[0] == (True, f"python {arguments}<|im_end|>")


@pytest.mark.parametrize(
    ("written", "arguments", "call"),
    [
        (ONE_BY_ONE, {"z": True, "b": None, "a": "x"}, "python<a>x<b>None<z>True"),
        (
            "{{ c.name }} {{ dict(c.arguments | dictsort) | tojson }}",
            {"z": "1\u00a02", "a": [True]},
            'python {"a": [true], "z": "1\u00a02"}',
        ),
        ("{{ c.name }} {{ {'a': '\\u00a0'} | tojson }}", {"a": "\u00a0"}, 'python {"a": "\u00a0"}'),
    ],
    ids=["pairs", "object", "space"],
)
def test_a_template_may_sort_arguments_and_write_words_of_python(
    written: str, arguments: dict, call: str, tmp_path: Path
) -> None:
    tokenizer = calls_written(written)
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": with_arguments(arguments)}])
    assert runs(sequence, tokenizer)[0] == (True, f"{call}<|im_end|>")


def test_the_fourth_form_is_taken(tmp_path: Path) -> None:
    """A null content, and arguments as text."""
    both = "{{ raise_exception('null') if m.content is not none }}{{ c.name ~ ' ' + c.arguments }}"
    tokenizer = calls_written(both)
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": with_arguments({"a": 1})}])
    assert runs(sequence, tokenizer)[0] == (True, 'python {"a": 1}<|im_end|>')


def test_the_error_is_not_that_of_a_wrong_form(tmp_path: Path) -> None:
    tokenizer = calls_written("{{ '' + c.arguments }}{{ raise_exception('ids of nine letters') }}")
    told = reason(tmp_path, tokenizer, {"messages": MESSAGES})
    assert "ids of nine letters" in told and "concatenate" not in told


def test_a_call_without_arguments_is_not_found_in_the_answer(tmp_path: Path) -> None:
    answer = {**ANSWER, "content": "By python it is 42."}
    messages = [*with_arguments({})[:3], answer]
    told = reason(tmp_path, calls_written(""), {"messages": messages})
    assert "leaves out the call" in told
    tokenizer = calls_written("{{ c.name }}")
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": messages}])
    assert runs(sequence, tokenizer)[0] == (True, "python<|im_end|>")


def test_outputs_that_stand_in_their_calls_do_not_hide_them(tmp_path: Path) -> None:
    """The calls have the texts of later turns in them: "42", "4", "python"."""
    tokenizer = chat_tokenizer("qwen2.5-tools")
    again = {"role": "user", "content": "4"}
    calling = with_arguments({"code": "print(42) # 4 python 6 x 7?"})[:3]
    ((sequence,), report) = load(
        tmp_path, tokenizer, [{"messages": [*calling, ANSWER, again, *calling[1:], ANSWER]}]
    )
    assert report.unusable == ()
    assert [is_learned for is_learned, _ in runs(sequence, tokenizer)] == [True, False] * 3 + [True]


def test_the_form_is_chosen_once_and_rows_without_calls_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = calls_written("{{ c.name ~ ' ' + c.arguments }}")
    load(tmp_path, tokenizer, [{"messages": [ASKED, ANSWER]}])  # what is asked of a template once
    apply = tokenizer.apply_chat_template
    texts: list[str] = []

    def counted(messages: Any, **keywords: Any) -> Any:
        texts.append("refused")
        texts[-1] = str(apply(messages, **keywords))
        return texts[-1]

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    load(tmp_path, tokenizer, [{"messages": [ASKED, ANSWER]}])
    assert len(texts) == 2, "the whole and the prompt"
    del texts[:]
    load(tmp_path, tokenizer, [{"messages": MESSAGES}])
    refused = texts.count("refused")
    written = [text for text in texts if text != "refused" and CODE[:5] in text]
    assert written and refused == 4, "two forms of the whole, and two of plain turns for its marks"
    assert len(texts) == 4 + 2 + 3, "and two prompts and a turn in the form of the whole"


def test_a_hostile_text_is_not_read_at_each_of_its_braces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []

    class CountedDecoder(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
            places.append(idx)
            return super().raw_decode(s, idx)

    tokenizer = calls_written("{{ c.name }} none")
    messages = [ASKED, CALLED, {**OUTPUT, "content": '{"a":' * 1000}, ANSWER]
    messages[1] = {**CALLED, "content": 'python {"a":' + '{"a":' * 1000}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}) + '\n{"prompt": "1", "completion": "2"}\n')
    monkeypatch.setattr("rlmath.data.chat.json.JSONDecoder", CountedDecoder)
    _, report = load_sequences(str(path), tokenizer, "auto", limit=9999, max_unusable_share=1.0)
    assert "leaves out the call" in report.unusable[0].reason
    assert 0 < len(places) <= 4 * MOST_OBJECTS


def test_prompts_of_calls_that_a_template_leaves_out_are_taken() -> None:
    """Only what is learned needs them; calls that cannot be read are the template's."""
    tokenizer = chat_tokenizer("smollm3")
    question = {"role": "user", "content": "And 6 x 8?"}
    for calls in ([CALL], [{"name": "f", "arguments": "{"}], "x"):
        turns = [ASKED, {**CALLED, "content": "So.", "tool_calls": calls}, OUTPUT, ANSWER, question]
        text = render(messages_of(turns, "messages"), tokenizer, "a prompt")
        assert text.endswith("And 6 x 8?<|im_end|>\n<|im_start|>assistant\n")
    with_tools = chat_tokenizer("qwen2.5-tools")
    text = render(messages_of([*MESSAGES, question], "messages"), with_tools, "a prompt")
    assert HERMES_CALL in text


@pytest.mark.parametrize("calls", [{}, False, 0, "[]", None])
def test_no_calls_are_none(calls: Any) -> None:
    (message,) = messages_of([{**ANSWER, "tool_calls": calls}], "messages", are_learned=True)
    assert message == ANSWER


# ---------------------------------------------------------------- fences


TURNS = ("We compute it.\n```python\nprint(6 * 7)\n```", "\nOnce more:\n\n```python\n1 / 0\n```")
OUTPUTS = ("42\n", "Traceback\nZeroDivisionError: é\n")
LAST = "The answer is \\boxed{42}."
FENCED = "".join(
    f"{turn}\n```output\n{output}```\n" for turn, output in zip(TURNS, OUTPUTS, strict=True)
)
ROW = {"prompt": "6x7:", "completion": FENCED + LAST}
MOST = 64


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokens_are_those_that_sampling_makes(name: str, tmp_path: Path) -> None:
    """An engine stops at the end of each call, and its output is put behind it."""
    tokenizer = tokenizer_of(name)
    form = FenceFormat(tokenizer, MOST)
    ((sequence,), _) = load(tmp_path, tokenizer, [ROW], fences=form)
    learned = sequence.learned
    assert learned is not None
    ids = list(sequence.completion_ids)
    line_end = tokenizer("\n", add_special_tokens=False)["input_ids"]
    before = list(sequence.prompt_ids)
    position = 0
    for turn, printed in zip(TURNS, OUTPUTS, strict=True):
        call = first_complete(form, ids[position:])
        assert call is not None
        sampled = ids[position : position + call[0]]
        assert tokenizer.decode([*before, *sampled]).endswith(
            "\n" + turn if before == line_end else "6x7:" + turn
        )
        assert all(learned[position:][: call[0]])
        position += call[0]
        output = form.output(form.text_of(sampled), printed).token_ids
        assert ids[position : position + len(output)] == output
        assert not any(learned[position:][: len(output)])
        position += len(output)
        before = line_end
    assert tokenizer.decode([*before, *ids[position:-1]]).endswith("\n" + LAST)
    assert ids[-1] == tokenizer.eos_token_id and all(learned[position:])


@pytest.mark.parametrize("name", ["qwen3-tools", "llama3-tools", "mistral-tools"])
def test_outputs_in_conversations_are_not_learned(name: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(name)
    form = FenceFormat(tokenizer, MOST)
    messages = [ASKED, {"role": "assistant", "content": FENCED + LAST}]
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": messages}], fences=form)
    ((all_learned,), _) = load(tmp_path, tokenizer, [{"messages": messages}])
    assert all_learned.learned is None, "without the format it is a text like others"
    assert sequence.completion_ids == all_learned.completion_ids, "here no token goes over a border"
    assert [text for is_learned, text in runs(sequence, tokenizer) if not is_learned] == [
        f"\n```output\n{output}```\n" for output in OUTPUTS
    ]


def test_rows_are_written_as_engines_write(tmp_path: Path) -> None:
    """Blank lines and spaces around an output are another's; a long output is cut."""
    tokenizer = chat_tokenizer("qwen3")
    form = FenceFormat(tokenizer, MOST)
    loose = "```python\n1\n```  \n\n  ```output \n1\n```\t\n\nSo 1."
    long = f"```python\n1\n```\n```output\n{'7' * 200}\n```"
    empty = "```python\n1\n```\n```output\n```\n"
    (first, second, third), _ = load(
        tmp_path,
        tokenizer,
        [{"prompt": "1", "completion": text} for text in (loose, long, empty)],
        fences=form,
    )
    assert runs(first, tokenizer) == [
        (True, "```python\n1\n```"),
        (False, "\n```output\n1\n```\n"),
        (True, "\nSo 1.<|endoftext|>"),
    ]
    call, (_, output), end = runs(second, tokenizer)
    assert "tokens left out" in output and second.length < 1 + 15 + MOST + BOUNDARY_TOKENS + 2
    assert end == (True, "<|endoftext|>") and call == (True, "```python\n1\n```")
    assert runs(third, tokenizer)[1] == (False, "\n```output\n```\n")


@pytest.mark.parametrize(
    ("completion", "told"),
    [
        ("```python\n1\n```\nSo 1.", "behind the call '1' of its answer stands '\\nSo 1.'"),
        ("```python\n1\n```", "behind the call '1' of its answer stands ''"),
        ("So:\n```output\n1\n```", "its answer has an output without a call before it"),
        (FENCED + "```output\n1\n```\n", "its answer has an output without a call before it"),
        ("```python\nx```\n```output\n1\n```\n", "behind the call 'x```' of its answer"),
        (
            "```python\n1\n```\n```output\nSee:\n```text\nabc\n```\n```\nSo.",
            "the output of the call '1' of its answer has the line '```text' before its end",
        ),
        (
            "```python\n1\n```\n```output\n1\nSo:\n```python\n2\n```\n```output\n2\n```\n",
            "the output of the call '1' of its answer has the line '```python' before its end",
        ),
        (
            "```python\n1\n```\n```output\n1\nSo 1.",
            "the output of the call '1' of its answer has no e",
        ),
    ],
)
def test_what_sampling_cannot_make_is_told(completion: str, told: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen3")
    row = {"prompt": "1", "completion": completion}
    explanation = reason(tmp_path, tokenizer, row, fences=FenceFormat(tokenizer, MOST))
    assert told in explanation and "needed is" in explanation
    (_, sequence), _ = load(tmp_path, tokenizer, [{"prompt": "1", "completion": "2"}, row])
    assert sequence.learned is None


def test_an_output_may_be_the_last_of_an_answer(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen2.5-tools")
    form = FenceFormat(tokenizer, MOST)
    messages = [ASKED, {"role": "assistant", "content": "```python\n1\n```\n```output\n1\n```"}]
    ((sequence,), _) = load(tmp_path, tokenizer, [{"messages": messages}], fences=form)
    assert runs(sequence, tokenizer) == [
        (True, "```python\n1\n```"),
        (False, "\n```output\n1\n```\n"),
        (True, "<|im_end|>"),
    ]


def test_outputs_are_cleaned_as_a_sandbox_does(tmp_path: Path) -> None:
    """Also they are cut to the characters that it keeps, of which the tokens are counted."""
    tokenizer = chat_tokenizer("qwen3")
    form = FenceFormat(tokenizer, MOST)
    printed = "\x1b[31mred\x07 <f at 0x7f3c2a1b4e50>\r\n"
    rows = [
        {"prompt": "1", "completion": f"```python\n1\n```\n```output\n{text}```\n"}
        for text in (printed, "7" * 5000 + "\n")
    ]
    (cleaned, cut), _ = load(tmp_path, tokenizer, rows, fences=form)
    assert runs(cleaned, tokenizer)[1] == (False, "\n```output\nred <f at 0x...>\n```\n")
    shown, _ = shown_text("7" * 5000 + "\n", 0, most_output_characters(MOST))
    output = form.output("```python\n1\n```", shown).text
    assert output in runs(cut, tokenizer)[1][1]


def test_an_output_counts_nowhere_in_the_loss(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen3")
    ((sequence,), _) = load(tmp_path, tokenizer, [ROW], fences=FenceFormat(tokenizer, MOST))
    batch = pack([sequence.sample()], [0], 1)
    expected = "".join(TURNS) + LAST + "<|endoftext|>"
    assert tokenizer.decode(batch.token_ids_T[batch.loss_weights_T > 0]) == expected
    assert batch.loss_count == sequence.n_learned == int(batch.loss_weights_T.sum())
    assert batch.learned_T.equal(batch.loss_weights_T > 0) and batch.sampled_T.equal(
        batch.learned_T
    )
    assert sequence.length > len(sequence.prompt_ids) + sequence.n_learned


def test_outputs_that_are_learned_are_a_finding(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen3")
    later = {"prompt": "1", "completion": "```python\n1\n```\nSo:\n" + FENCED}
    rows = [later, {"prompt": "1", "completion": "```python\n1\n```"}, ROW]
    sequences, report = load(tmp_path, tokenizer, rows)
    audit = audit_sequences([("rows", sequences)], [], [report], tokenizer)
    (text,) = [finding.text for finding in audit.findings if "outputs" in finding.text]
    assert text.startswith("2 of the 3 sequences of ") and "Set tools.format=fence" in text
    sequences, report = load(tmp_path, tokenizer, [ROW], fences=FenceFormat(tokenizer, MOST))
    audit = audit_sequences([("rows", sequences)], [], [report], tokenizer)
    assert audit.findings == ()


def test_the_rows_of_the_docs_are_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "tool_cold_starts.md"
    blocks = page.read_text(encoding="utf-8").split("\n```\n")[1::2]
    rows = [json.loads(block) for block in blocks]
    tokenizer = chat_tokenizer("qwen2.5-tools")
    sequences, report = load(tmp_path, tokenizer, rows, fences=FenceFormat(tokenizer, MOST))
    assert report.unusable == () and len(sequences) == 2
    assert [runs(sequence, tokenizer)[1][1] for sequence in sequences] == [
        "\n```output\n42\n```\n",
        HERMES_OUTPUT,
    ]


# ---------------------------------------------------------------- what a dry run shows


def parts(lines: tuple[str, ...]) -> list[tuple[str, str]]:
    """(label with the mark of what is learned, text) of the parts of a picture."""
    shown: list[list[str]] = []
    for line in lines[3:]:
        if line[:15].strip():
            shown.append([line[2:15].strip(), ""])
        shown[-1][1] += line[15:].replace("│", "")
    return [(label, text) for label, text in shown]


def test_a_dry_run_shows_outputs_as_not_learned(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen3")
    form = FenceFormat(tokenizer, MOST)
    answer = f"{TURNS[0]}\n\n```output\n{OUTPUTS[0]}```\nSo 42."
    messages = [ASKED, {"role": "assistant", "content": answer}]
    ((sequence,), report) = load(tmp_path, tokenizer, [{"messages": messages}], fences=form)
    lines = sequence_lines(report, DataConfig(), tokenizer, form)
    assert parts(lines)[-8:] == [
        ("row", "6 x 7?"),
        ("template", "<|im_end|>↵"),
        ("generation", "<|im_start|>assistant↵"),
        ("* template", "<think>↵↵</think>↵↵"),
        ("* row", "We compute it.↵```python↵print(6 * 7)↵```"),
        ("given", "↵```output↵42↵```↵"),
        ("* row", "So 42."),
        ("* end", "<|im_end|>"),
    ]
    assert f"the {sequence.n_learned} of lines with * are learned" in lines[2]


def test_a_dry_run_shows_calls(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("qwen2.5-tools")
    _, report = load(tmp_path, tokenizer, [{"messages": MESSAGES}])
    assert parts(sequence_lines(report, DataConfig(), tokenizer)) == [
        ("template", "<|im_start|>user↵"),
        ("row", "6 x 7?"),
        ("template", "<|im_end|>↵"),
        ("generation", "<|im_start|>assistant↵"),
        ("* template", '<tool_call>↵{"name": "python", "arguments": '),
        ("* row", ARGUMENTS),
        ("* template", "}↵</tool_call>"),
        ("* end", "<|im_end|>"),
        ("template", "↵<|im_start|>user↵<tool_response>↵"),
        ("row", "42"),
        ("template", "↵</tool_response><|im_end|>↵"),
        ("generation", "<|im_start|>assistant↵"),
        ("* row", "It is 42."),
        ("* end", "<|im_end|>"),
    ]
