"""The prompts of the recipes with a Python tool, in the manner of their sources.

A setting names one as configs/tools/prompts.py:torl, from the folder that has configs/."""

from __future__ import annotations


def torl(problem: str, row: dict) -> str:
    """A text for a base model: ToRL's is a conversation of User and Assistant, too."""
    return (
        "A conversation between User and Assistant. The User asks, the Assistant solves it with "
        "natural language and programs: a block that begins with ```python and ends with ``` is "
        "executed, and what it prints follows in a block ```output.\n"
        "User: Solve the problem, and put the final answer within \\boxed{}.\n"
        f"{problem}\n"
        "Assistant:"
    )


def simpletir(problem: str, row: dict) -> list[dict]:
    """A chat that says what SimpleTIR's says: code is executed, print() shows, a box answers."""
    request = (
        "Solve the problem step by step. You may write Python: every block that begins with "
        "```python and ends with ``` is executed as a whole script, with its imports, and what it "
        "prints with print() follows in a block ```output. The last part of your response must "
        "be the final answer within \\boxed{}.\n\n"
    )
    return [{"role": "user", "content": request + problem}]


def retool(problem: str, row: dict) -> list[dict]:
    """A chat whose request for a box is that of verl's recipe; the template shows the tool."""
    return [
        {
            "role": "user",
            "content": f"{problem}\nThe answer format must be: \\boxed{{the final answer}}",
        }
    ]
