import json

from tools.bench_rollout import VARIANTS, Work, report


def test_prompts_are_others_in_every_repeat_and_the_same_on_both_sides():
    work = Work("model", "cpu", requests=3, new_tokens=8, prompt_tokens=16)
    first, second = work.prompts(0), work.prompts(1)
    assert first == work.prompts(0) and [len(ids) for ids in first] == [16] * 3
    assert not {tuple(ids) for ids in first} & {tuple(ids) for ids in second}


def test_figures_are_medians_and_what_no_cause_explains_is_ours(capsys):
    ours = [
        {"all": 2.0, "vLLM's step": 1.5, "scheduling": 0.5},
        {"all": 4.0, "vLLM's step": 3.5, "scheduling": 0.75},
        {"all": 4.0, "vLLM's step": 3.0},
    ]
    found = {"ours": ours} | {name: [{"all": 2.0 + n}] for n, name in enumerate(VARIANTS)}
    report("case", 120, found)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["metric"], line["value"], line["baseline"], line["ratio"]) for line in lines] == [
        ("tokens_per_second", 30.0, "LLM.generate, seeds and log-probs: 60 tokens/s", 0.5),
        ("tokens_per_second", 30.0, "LLM.generate, log-probs: 40 tokens/s", 0.75),
        ("tokens_per_second", 30.0, "LLM.generate, neither: 30 tokens/s", 1.0),
        ("seconds: all", 4.0, None, None),
        ("seconds: vLLM's step", 3.0, None, None),
        ("seconds: scheduling", 0.5, None, None),
        ("seconds: ours", 0.5, None, None),
    ]
