"""Chat templates in the manner of published models, written anew.

A tokenizer has their marks."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
)
_CHATML_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n"
_QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set "
    "ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role != 'assistant' %}"
    + _CHATML_TURN
    + "{% else %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in "
    "m.content else '' %}"
    "{% set thought = thought.strip('\n') %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought "
    "}}\n</think>\n\n{% endif %}"
    "{{ said }}<|im_end|>\n{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Chat:
    template: str
    end: str
    """What ends the assistant's turn."""
    takes_system: bool = True
    eos: str = "<|endoftext|>"


CHATS = {
    "llama3": Chat(
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role "
        "}}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif "
        "%}",
        "<|eot_id|>",
    ),
    "mistral": Chat(
        "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %}"
        " {{ m.content | trim }}</s>{% else %}{{ raise_exception('only user and assistant') }}{% "
        "endif %}{% endfor %}",
        "</s>",
        takes_system=False,
        eos="</s>",
    ),
    "qwen2.5": Chat(
        _SYSTEM + "{% for m in messages %}" + _CHATML_TURN + "{% endfor %}" + _ASK + "{% endif %}",
        "<|im_end|>",
    ),
    "smollm2": Chat(
        _SYSTEM.replace("You help.", "You are SmolLM.")
        + "{% for m in messages %}"
        + _CHATML_TURN
        + "{% endfor %}"
        + _ASK
        + "{% endif %}",
        "<|im_end|>",
        eos="<|im_end|>",
    ),
    "qwen3": Chat(
        _QWEN3
        + _ASK
        + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% "
        "endif %}"
        "{% endif %}",
        "<|im_end|>",
    ),
    "qwen3-thinking": Chat(_QWEN3 + _ASK + "<think>\n{% endif %}", "<|im_end|>"),
    "phi": Chat(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "<|end|>",
    ),
    "gemma": Chat(
        "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system "
        "turn') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim "
        "}}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<end_of_turn>",
        takes_system=False,
    ),
    "r1-distill": Chat(
        "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ "
        "m.content }}"
        "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] "
        "}}<｜end▁of▁sentence｜>"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}",
        "<｜end▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    ),
}
"""R1-Distill's template takes the thinking out of every answer.

None of its answers therefore continues its prompt."""

_HERMES_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' else "
    "'You help.' }}\n\n# Tools\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "</tools><|im_end|>\n{% elif messages[0].role == 'system' %}<|im_start|>system\n"
    "{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
_HERMES_CALL = (
    "{% for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": ARGUMENTS}\n</tool_call>{% endfor %}'
)
_HERMES_TURNS = (
    _HERMES_TOOLS + "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'user' %}"
    + _CHATML_TURN
    + "{% elif m.role "
    "== 'assistant' %}<|im_start|>assistant\nTHOUGHT{{ m.content or '' }}"
    + _HERMES_CALL
    + "<|im_end|>\n{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}" + _ASK
)
_TOJSON = "{{ call.function.arguments | tojson }}"
_SMOLLM3 = (
    "{% if xml_tools %}<|im_start|>system\n{{ xml_tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{{ m.content if m.content is string else '' }}<|im_end|>\n{% endfor %}" + _ASK + "{% endif %}"
)
TOOL_CHATS = {
    "qwen2.5-tools": Chat(
        _HERMES_TURNS.replace("THOUGHT", "").replace("ARGUMENTS", _TOJSON) + "{% endif %}",
        "<|im_end|>",
    ),
    "qwen3-tools": Chat(
        _HERMES_TURNS.replace(
            "THOUGHT",
            "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>\n"
            "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}",
        ).replace(
            "ARGUMENTS",
            "{% if call.function.arguments is string %}{{ call.function.arguments }}"
            "{% else %}" + _TOJSON + "{% endif %}",
        )
        + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
        "{% endif %}{% endif %}",
        "<|im_end|>",
    ),
    "llama3-tools": Chat(
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>"
        "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
        "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
        "{{ raise_exception('one call in a turn') }}{% endif %}"
        '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
        "{{ m.tool_calls[0].function.arguments | tojson }}}"
        "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}"
        "{{ tools | tojson ~ '\n' if tools and loop.first else '' }}{{ m.content | trim }}{% endif %}"
        "{{ '<|eom_id|>' if m.tool_calls and builtin_tools else '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif "
        "%}",
        "<|eot_id|>",
    ),
    "mistral-tools": Chat(
        "<s>{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}"
        "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS][{% for call in "
        "m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('ids of nine letters') }}"
        "{% endif %}{{ ', ' if not loop.first }}{{ call.function | tojson }}{% endfor %}]</s>"
        "{% elif m.role == 'tool' %}"
        '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}'
        "[/TOOL_RESULTS]{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% endif %}"
        "{% endfor %}",
        "</s>",
        takes_system=False,
        eos="</s>",
    ),
    "smollm3": Chat(_SMOLLM3, "<|im_end|>", eos="<|im_end|>"),
}
"""Chats with calls of tools. Qwen3's takes the thinking out of turns before the last question, and
SmolLM3's has neither the row's tools nor its calls."""
_TOOL_MARKS = (
    "<|eom_id|>",
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
)

MARKS = [
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
    ),
    *(
        "<|eot_id|>",
        "<s>",
        "</s>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "<|end|>",
        "<bos>",
        "<start_of_turn>",
    ),
    *(
        "<end_of_turn>",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
    ),
]


def chat_tokenizer(name: str, special_thinking: bool = False) -> PreTrainedTokenizerFast:
    """Bytes and marks; `<think>` and `</think>` are special tokens, added ones or text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    if special_thinking:
        inner.add_special_tokens(["<think>", "</think>"])
    if name in TOOL_CHATS:
        inner.add_special_tokens([AddedToken(mark, normalized=False) for mark in _TOOL_MARKS])
        inner.add_tokens(["<tool_call>", "</tool_call>"])
    chat = (CHATS | TOOL_CHATS)[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=chat.eos)
    tokenizer.chat_template = chat.template
    return tokenizer
