"""Chat templates with tools in the manner of published models, written anew."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlmath.data.chat import ChatSettings, set_template
from rlmath.data.tool_chats import PYTHON
from tests.data.chat_templates import CHATS, MARKS

_HERMES_SYSTEM = (
    "<|im_start|>system\nYou help.{% if tools %}{{ '\n' }}{% for tool in tools %}"
    "{{ tool | tojson }}{% endfor %} Call as <tool_call>{...}</tool_call>{% endif %}<|im_end|>\n"
)
_HERMES_CALLS = (
    "{% for call in m.tool_calls or [] %}{% if said or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
_XML_CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>"
    "{{ call.function.arguments.code }}</function>\n</tool_call>{% endfor %}"
)
_HERMES_OUTPUTS = (
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)


def _chatml(answer: str, generation: str = "") -> str:
    """A template with turns of ChatML, `said` by the assistant and with calls as `answer` has it."""
    return (
        _HERMES_SYSTEM
        + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        + f"{answer}{{{{ '<|im_end|>\\n' }}}}"
        + _HERMES_OUTPUTS
        + "{% else %}<|im_start|>{{ m.role }}{{ '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
        + "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        + f"{generation}{{% endif %}}"
    )


_SAID = "{% set said = m.content %}{{ said }}"
_QWEN3_SAID = (
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' %}"
    "{% if loop.last or thought %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ said }}"
)
_THOUGHT_LAST = (
    "{% set said = m.content if messages[loop.index0:] | selectattr('role', 'eq', 'assistant') "
    "| list | length == 1 else m.content.split('</think>')[-1].lstrip('\n') %}{{ said }}"
)
_UNTHOUGHT = "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}{{ said }}"
_UNTHINKING = "<think>\n\n</think>\n"
_OFF = "{% if enable_thinking is defined %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"

TOOL_CHATS = {
    "qwen2.5": _chatml(_SAID + _HERMES_CALLS),
    "qwen3": _chatml(_QWEN3_SAID + _HERMES_CALLS, _OFF),
    "qwen3-off": _chatml(_QWEN3_SAID + _HERMES_CALLS, _OFF.replace("is defined", "is undefined")),
    "qwen3-thinking": _chatml(_QWEN3_SAID + _HERMES_CALLS, "{{ '<think>\n' }}"),
    "strips-earlier": _chatml(_THOUGHT_LAST + _HERMES_CALLS),
    "strips-thinking": _chatml(_UNTHOUGHT + _HERMES_CALLS),
    "xml": _chatml(_SAID + _XML_CALLS),
    "smollm3": (
        "<|im_start|>system\nYou help.{% if xml_tools %}{{ '\n' }}{% for tool in xml_tools %}"
        "{{ tool | string }}{% endfor %} Call as <tool_call>{...}</tool_call>{% endif %}<|im_end|>"
        "{{ '\n' }}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}"
        "{{ '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "smollm3-off": (
        "<|im_start|>system\nYou help.{% if xml_tools or tools %}{{ '\n' }}{% for tool in "
        "(tools or xml_tools)[:] %}{{ tool | string }}{% endfor %} Call as <tool_call>{...}"
        "</tool_call>{% endif %}<|im_end|>{{ '\n' }}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n"
        + _UNTHINKING
        + "' + m.content.lstrip('\n') + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
        "<|im_start|>user{{ '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
        + _UNTHINKING
        + "' }}{% endif %}"
    ),
    "llama3": (
        "<|begin_of_text|>{% for m in messages %}{% if m.role == 'tool' %}"
        "<|start_header_id|>ipython<|end_header_id|>{{ '\n\n' }}{{ m.content | tojson }}<|eot_id|>"
        "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call at a time') }}{% endif %}"
        "<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}"
        '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
        "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
        "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ '\n\n' }}"
        "{% if tools and loop.first %}{{ tools[0] | tojson(indent=4) }}{% endif %}"
        "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}"
        "{% endif %}"
    ),
    "mistral": (
        "<s>{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]"
        "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
        "{% if call.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
        '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ \', \' if not loop.last }}'
        "{% endfor %}]</s>{% elif m.role == 'tool' %}[TOOL_RESULTS]{\"content\": {{ m.content }}, "
        '"call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    "mistral-spaces": (
        "{% set first = 1 if messages[0].role == 'system' else 0 %}<s>"
        "{% for m in messages[first:] %}{% if m.role == 'user' %}{% if tools %} [AVAILABLE_TOOLS] "
        "{{ tools | tojson }} [/AVAILABLE_TOOLS]{% endif %} [INST] "
        "{% if first and loop.last %}{{ messages[0].content + '\n\n' }}{% endif %}"
        "{{ m.content }} [/INST]"
        "{% elif m.tool_calls %} [TOOL_CALLS] [{% for call in m.tool_calls %}"
        "{{ {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}"
        "{{ ', ' if not loop.last }}{% endfor %}] </s>{% elif m.role == 'tool' %} [TOOL_RESULTS] "
        '{"call_id": "{{ m.tool_call_id }}", "content": {{ m.content }}} [/TOOL_RESULTS]{{ \' \' }}'
        "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
    ),
    "mistral-ids": (
        "<s>{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]"
        "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}"
        "[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}"
        "[/TOOL_RESULTS]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    "mistral-args": (
        "<s>{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]"
        "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}"
        "[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content | trim }}[/TOOL_RESULTS]"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    ),
}
"""qwen3-off has an empty thought in its prompts, and in no earlier turn, smollm3-off in both;
strips-earlier keeps thinking in the last of the assistant's turns alone, and mistral-spaces a system
prompt in a question that is the last turn."""

TOOL_MARKS = [
    *("[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[INST]", "[/INST]", "<|python_tag|>", "<|eom_id|>"),
    *("[CALL_ID]", "[TOOL_CONTENT]"),
]
"""Special tokens, beside those of MARKS."""
TOOL_TEXTS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
"""Added tokens that are not special, as in Qwen3's tokenizer."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and marks, without a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS + TOOL_MARKS])
    inner.add_tokens([AddedToken(text, normalized=False) for text in TOOL_TEXTS])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")


def with_tool(
    tokenizer: PreTrainedTokenizerFast, name: str, settings: ChatSettings | None = None
) -> PreTrainedTokenizerFast:
    """The tokenizer with a template whose prompts show the tool."""
    tokenizer.chat_template = TOOL_CHATS[name] if name in TOOL_CHATS else CHATS[name].template
    set_template(tokenizer, settings or ChatSettings(tool=PYTHON), "model")
    return tokenizer
