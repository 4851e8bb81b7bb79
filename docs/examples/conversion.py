"""A Hugging Face model as a Megatron-Core checkpoint (tensor parallelism 2) and back, bit by bit.

python docs/examples/conversion.py
"""

from pathlib import Path

from safetensors.torch import load_file

from rlmath.cli import convert, make_tiny_model

FOLDER = Path("outputs/examples/conversion")


def main() -> None:
    if not FOLDER.exists():
        make_tiny_model.main(["--output", f"{FOLDER}/model"])
        there = f"to-megatron --hf {FOLDER}/model --output {FOLDER}/megatron --tensor-parallel 2"
        back = f"to-hf --checkpoint {FOLDER}/megatron --output {FOLDER}/back"
        assert convert.main(there.split()) == convert.main(back.split()) == 0
    before, after = (load_file(FOLDER / name / "model.safetensors") for name in ("model", "back"))
    assert before.keys() == after.keys()
    same = sum(before[name].equal(after[name]) for name in before)
    print(f"{same} of {len(before)} tensors are the same, bit by bit")


if __name__ == "__main__":
    main()
