"""The parts of `make test-full`: which tests guard what.

Every test file is in one of them (`test_parts.py`).

make test-full PART=rollout
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent

PARTS = {
    "answers": ("answers",),
    "rewards": ("rewards", "workers", "distributed/test_hooks.py", "sandbox"),
    "config": ("config", "cli", "test_recipes.py", "test_hub_run.py"),
    "planning": ("planning", "distributed/test_memory_plan.py"),
    "data": ("data",),
    "models": (
        "algorithms",
        "models",
        "test_megatron_patches.py",
        *(
            f"distributed/test_{name}.py"
            for name in (
                *(
                    "architectures",
                    "context",
                    "critic",
                    "early_stop",
                    "grpo_settings",
                    "invariance",
                    "layouts",
                ),
                *(
                    "lora_learning",
                    "moe",
                    "offload",
                    "optimizer",
                    "parity",
                    "routing_replay",
                    "sft",
                    "teacher",
                    "update",
                ),
            )
        ),
    ),
    "checkpoint": (
        "checkpoint",
        "distributed/test_convert_loads.py",
        "distributed/test_lora_folders.py",
        "distributed/test_store.py",
        "test_lora_run.py",
        "test_resume.py",
    ),
    "rollout": (
        "rollout",
        *(
            f"distributed/test_{name}.py"
            for name in (
                "async",
                "engine",
                "partial_rollouts",
                "probe",
                "rollout",
                "switch",
                "sync",
                "tool_faults",
                "tools",
            )
        ),
        "test_async_run.py",
        "test_tools_demo.py",
        "test_feedback_demo.py",
    ),
    "distributed": (
        *(
            f"distributed/test_{name}.py"
            for name in (
                *(
                    "bridge",
                    "collectives",
                    "cpu_matmul",
                    "device",
                    "garbage",
                    "mesh",
                    "parent_death",
                ),
                *("phase_timers", "rendezvous", "run_store", "tensor_offload"),
            )
        ),
        "distributed/fault_tolerance",
        "hosts",
        "test_failures.py",
    ),
    "run": (
        *("run", "trainer", "replay", "telemetry", "test_divergence.py", "test_end_to_end.py"),
        *("test_everything_on.py", "test_rollback.py", "test_staged_run.py", "test_teacher_run.py"),
        "test_routing_run.py",
        "test_tools_run.py",
        "test_train_sft.py",
        "test_turns_run.py",
    ),
    "evals": ("evals", "report"),
    "real-model": ("real_model",),
    "tools": (
        *(
            "tools",
            "gpu",
            "slurm",
            "test_docs.py",
            "test_docstrings.py",
            "test_drill.py",
            "test_examples.py",
        ),
        *("test_layers.py", "test_left_over.py", "test_parts.py"),
    ),
}


def paths_of(part: str) -> list[str]:
    """Folders and files of a part, from the repository's root.

    ValueError where there is none of that name."""
    if part not in PARTS:
        raise ValueError(
            f'there is no part "{part}" of the tests; the parts are {", ".join(PARTS)}'
        )
    return [str((TESTS / name).relative_to(TESTS.parent)) for name in PARTS[part]]


def part_of(file: Path) -> list[str]:
    """The parts that have a test file: one, if the table is right."""
    parts = []
    for part, names in PARTS.items():
        if any(file == TESTS / name or (TESTS / name) in file.parents for name in names):
            parts.append(part)
    return parts
