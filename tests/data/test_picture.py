"""What a dry run shows of the first prompt and the first sequence."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers.processors import TemplateProcessing

from rlmath.config.schema import DataConfig
from rlmath.data.audit import prompt_lines, sequence_lines, without_conversation
from rlmath.data.chat import ChatSettings, chat_settings, set_template
from rlmath.data.loader import load_prompts
from rlmath.data.picture import WIDTH, Part, picture
from rlmath.data.sft_sequences import load_sequences
from tests.data.chat_templates import chat_tokenizer


def shown_prompt(tmp_path: Path, tokenizer, row: dict, data: DataConfig) -> list[str]:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    set_template(tokenizer, chat_settings(data), "here")
    (prompt,), report = load_prompts(str(file), tokenizer, 2000, template=data.template)
    lines = prompt_lines(prompt, report, data, tokenizer)
    marks = sum(line.count("│") for line in lines[3:])
    assert marks == len(prompt.token_ids), "one token a mark, where no character has several"
    return list(lines[3:])


def shown_sequence(tmp_path: Path, tokenizer, row: dict, data: DataConfig) -> list[str]:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    set_template(tokenizer, chat_settings(data), "here")
    ((sequence,), report) = load_sequences(str(file), tokenizer, data.template, 2000, 0.0)
    lines = sequence_lines(report, data, tokenizer)
    learned = sum(line.count("│") for line in lines[3:] if line.startswith("  *"))
    assert (
        learned == sequence.n_learned and f"the {learned} of lines with * are learned" in lines[2]
    )
    return list(lines[3:])


def test_a_prompt_with_the_settings_and_the_request(tmp_path: Path) -> None:
    data = DataConfig(system_prompt="Be brief.", chat_template_kwargs=["enable_thinking=false"])
    row = {"question": "Six eggs,\ttwo eaten: how many are left?", "answer": "6 - 2 = 4\n#### 4"}
    assert shown_prompt(tmp_path, chat_tokenizer("qwen3"), row, data) == [
        "    template   <|im_start|>│s│y│s│t│e│m│↵│",
        "    system     B│e│ │b│r│i│e│f│.│",
        "    template   <|im_end|>│↵│<|im_start|>│u│s│e│r│↵│",
        "    row        S│i│x│ │e│g│g│s│,│⇥│t│w│o│ │e│a│t│e│n│:│ │h│o│w│ │m│a│n│y│ │",
        "               a│r│e│ │l│e│f│t│?│",
        "    template   ↵│",
        "    request    P│l│e│a│s│e│ │r│e│a│s│o│n│ │s│t│e│p│ │b│y│ │s│t│e│p│,│ │a│n│",
        "               d│ │p│u│t│ │y│o│u│r│ │f│i│n│a│l│ │a│n│s│w│e│r│ │w│i│t│h│i│n│",
        "                │\\│b│o│x│e│d│{│}│.│",
        "    template   <|im_end|>│↵│",
        "    generation <|im_start|>│a│s│s│i│s│t│a│n│t│↵│<│t│h│i│n│k│>│↵│↵│<│/│t│h│i│",
        "               n│k│>│↵│↵│",
    ]


def test_sequences_with_what_is_learned(tmp_path: Path) -> None:
    turns = [("user", "1+1?"), ("assistant", "2"), ("user", "So?"), ("assistant", "s")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    assert shown_sequence(tmp_path, chat_tokenizer("gemma"), row, DataConfig()) == [
        "    template   <bos>│<start_of_turn>│u│s│e│r│↵│",
        "    row        1│+│1│?│",
        "    template   <end_of_turn>│↵│",
        "    generation <start_of_turn>│m│o│d│e│l│↵│",
        "  * row        2│",
        "  * end        <end_of_turn>│",
        "    template   ↵│<start_of_turn>│u│s│e│r│↵│",
        "    row        S│o│?│",
        "    template   <end_of_turn>│↵│",
        "    generation <start_of_turn>│m│o│d│e│l│↵│",
        "  * row        s│",
        "  * end        <end_of_turn>│",
    ]
    row = {"question": "1+1?", "solution": "<think>\n\n\nx</think>2"}
    data = DataConfig(template="chat")
    assert shown_sequence(tmp_path, chat_tokenizer("qwen3"), row, data)[-3:] == [
        "    generation <|im_start|>│a│s│s│i│s│t│a│n│t│↵│",
        "  * rewritten  <│t│h│i│n│k│>│↵│x│↵│<│/│t│h│i│n│k│>│↵│↵│2│",
        "  * end        <|im_end|>│",
    ]


def test_what_the_tokenizer_adds_and_whole_prompts(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("mistral")
    tokenizer.bos_token = "<s>"
    begin = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    data = DataConfig(system_prompt=None)
    row = {"prompt": "1+1=", "completion": "2"}
    assert shown_sequence(tmp_path, tokenizer, row, data) == [
        "    tokenizer  <s>│",
        "    row        1│+│1│=│",
        "  * row        2│",
        "  * end        </s>│",
    ]
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert shown_sequence(tmp_path, tokenizer, row, data)[0] == "    template   <s>│[│I│N│S│T│]│ │"
    whole = {"prompt": "<|user|>1+1?", "task": "math", "query_id": "q", "solutions": ["2"]}
    assert shown_prompt(tmp_path, chat_tokenizer("phi"), whole, data) == [
        "    row        <|user|>│1│+│1│?│"
    ]
    _, report = load_prompts(str(tmp_path / "rows.jsonl"), chat_tokenizer("phi"), 2000)
    assert without_conversation([report], ChatSettings()) == []
    (finding,) = without_conversation([report], ChatSettings(system_prompt="x"))
    assert finding.text.startswith("data.system_prompt does nothing for the whole prompts of")


def test_a_picture_fits_the_console_whatever_the_text_has() -> None:
    hostile = "\x1b[2J\u202e\r\n│↵" + "漢" * 50_000
    ends = [len(hostile), *range(1, 30_000), 25_000]
    lines = picture([Part("row", hostile)], ends)
    assert lines[0].startswith("    row        \\x1b│[│2│J│\\u202e│\\x0d│↵│\\u2502│\\u21b5│漢│")
    assert len(lines) == 5 and lines[2].strip() == "[... 49,941 characters, 29,964 tokens ...]"
    assert all(len(line) + line.count("漢") <= WIDTH for line in lines)
    many = picture([Part("row", "x", learned=bool(n % 2)) for n in range(41)], range(42))
    assert len(many) == 15 and many[7] == "    [... 27 parts ...]"
    assert picture([Part("row", "ab"), Part("end", "c")], [3]) == (
        "    row        ab",
        "    end        c│",
    )
