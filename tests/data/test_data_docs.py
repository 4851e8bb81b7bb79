"""The example rows of docs/data.md have the forms that they stand under."""

import json
import re
from pathlib import Path

from rlmath.data.formats import FORMS, read_prompts
from rlmath.data.tokenizer import FIXED

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_every_form_has_an_example_that_is_read(tmp_path):
    examples = dict(
        re.findall(r"^\*\*(\w+)\*\*:.*?```json\n(.*?)\n```", PAGE, re.DOTALL | re.MULTILINE)
    )
    assert set(examples) == set(FORMS)
    (tmp_path / "id2info.json").write_text(json.dumps({"q1": {"solutions": ["\\boxed{132}"]}}))
    for name, row in examples.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(json.loads(row)))
        file = read_prompts(str(path))
        assert file.form == name
        assert file.rows[0].solutions in {("132",), ("\\boxed{132}",), ("18",)}


def test_the_templates_are_as_the_page_has_them():
    for name in ("r1_distill", "qwen_boxed"):
        assert f"```\n{FIXED[name].render('{problem}').rstrip()}\n```" in PAGE
