"""rlmath plan: every recipe has a plan, more GPUs and shorter answers are faster, the page has the figures."""

from __future__ import annotations

import json
import shutil
import sys
import typing
from pathlib import Path

import pytest

from rlmath.cli.plan import main, published, recipe_of, tails_of
from rlmath.config.gpu_specs import GPUS, GpuName
from rlmath.planning.planner.partial_rollouts import deferring_rollout_of
from rlmath.planning.planner.published import COLOCATED, TABLE, largest_error
from rlmath.planning.planner.tails import deferring
from rlmath.planning.planner.work import seconds_of
from tests.selection import keeping, matrix
from tests.tiny_models import make_model_folder

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
RECIPES = sorted(
    str(path.relative_to(CONFIGS))
    for folder in ("areal", "rlinf", "simplerl")
    for path in (CONFIGS / folder).glob("*.yaml")
)
ALGORITHMS = sorted(f"algorithms/{path.name}" for path in (CONFIGS / "algorithms").glob("*.yaml"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.path={make_model_folder(tmp_path_factory.mktemp('planned') / 'model', tied=True)}"


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict:
    assert main([*arguments, "--layouts", "0", "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "name",
    keeping(
        RECIPES,
        "areal/v0.1_1.5b_stages.yaml",
        "areal/32b_n16.yaml",
        "rlinf/grpo-7b.yaml",
        "simplerl/v2.yaml",
        others=0,
    ),
)
def test_every_recipe_has_a_plan(name: str, capsys: pytest.CaptureFixture[str]):
    plan = planned(capsys, "--config", str(CONFIGS / name), "--prompts", "50000")
    assert plan["problems"] == [] and plan["steps_per_epoch"] >= 40
    for stage in plan["stages"]:
        assert stage["step_seconds"] == pytest.approx(sum(stage["seconds"].values()))
        assert all(seconds > 0 for name, seconds in stage["seconds"].items() if name != "sync")
        assert stage["flops"]["backward"] > stage["flops"]["sampling"] > 0


@pytest.mark.parametrize(
    "name",
    keeping(
        ALGORITHMS, "algorithms/dapo.yaml", "algorithms/critic.yaml", "algorithms/distill.yaml", others=3
    ),
)
def test_the_demo_has_a_plan_with_every_algorithm(name: str, model: str, capsys: pytest.CaptureFixture[str]):
    files = ("--config", str(CONFIGS / "demo.yaml"), "--config", str(CONFIGS / name))
    plan = planned(capsys, *files, model, "run.device=cpu")
    assert plan["cluster"]["machine"]["name"] == "CPU" and 0.1 < plan["step_seconds"] < 60


def test_the_whole_plan_as_text(capsys: pytest.CaptureFixture[str]):
    assert main(["--config", str(CONFIGS / "areal/1.5b_n16.yaml"), "--prompts", "106000"]) == 0
    out = capsys.readouterr().out
    for told in (
        "1.78 B parameters on 16 nodes of 8 H800-80GB, 400 Gbit/s each",
        "Planned memory of rank 0",
        "8,192 sequences, 128 + 8,294 tokens on average",
        "PFLOP forwards",
        "for the tail, when no request waits any more",
        "of judging are hidden",
        "An epoch has 207 steps",
        "Fastest by prediction:",
        "TP1 x PP1 x DP128, 128 engines of TP1  (as configured)",
        "flops_share                 0.55",
    ):
        assert told in out


def test_lengths_that_were_not_checked_are_told(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Ten prompts, and five a step, are two steps an epoch, if none is too long."""
    rows = [json.dumps({"question": f"What is 1+{n}?", "answer": f"{n + 1}"}) for n in range(10)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    words = ["--config", str(CONFIGS / "demo.yaml"), model, "run.device=cpu", "data.prompts_per_step=5"]
    words += ["--layouts", "0", f"data.train_path={tmp_path}/train.jsonl"]
    place = Path(model.removeprefix("model.path="))
    told = []
    monkeypatch.setitem(sys.modules, "transformers", None)
    for has_tokenizer in (True, False):
        folder = tmp_path / str(has_tokenizer)
        folder.mkdir()
        shutil.copy(place / "config.json", folder)
        if has_tokenizer:
            (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
        assert main([*words, f"model.path={folder}"]) == 0
        out = capsys.readouterr().out
        assert "An epoch has 2 steps" in out
        told += [line for line in out.splitlines() if "lengths were not checked" in line]
    assert [line.partition("checked: ")[2].partition(". ")[0] for line in told] == [
        f'transformers is not installed, which reads the tokenizer of "{tmp_path}/True"',
        f'"{tmp_path}/False" has no tokenizer here',
    ]


def test_a_table_that_cannot_be_read_needs_the_number_of_its_rows(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    words = ["--config", str(CONFIGS / "demo.yaml"), model, "run.device=cpu", "--layouts", "0"]
    words += [f"data.train_path={tmp_path}/train.parquet"]
    assert main(words) == 2
    assert "give the number of rows by --prompts" in capsys.readouterr().err
    assert main([*words, "--prompts", "100000"]) == 0


CARRYING = ("--config", str(CONFIGS / "algorithms/decoupled.yaml"), "rollout.tail=carry")


def tail_table(out: str) -> list[str]:
    """The lines of a plan about `rollout.tail`."""
    lines = out.splitlines()
    (first,) = [n for n, line in enumerate(lines) if line.startswith("Predicted step by rollout.tail")]
    return lines[first : lines.index("", first)]


@matrix
def test_the_step_with_every_rollout_tail(capsys: pytest.CaptureFixture[str]):
    told = ["--config", str(CONFIGS / "areal/1.5b_n16.yaml"), "--layouts", "0"]
    assert main(told) == 0
    table = tail_table(capsys.readouterr().out)
    assert [line.split()[:3] for line in table[2:4]] == [["244", "s", "wait"], ["174", "s", "carry"]]
    assert table[3].split()[3:] == ["1", "13,824", "1,024", "0.5"]
    assert table[4].split()[:4] == ["249", "s", "defer", "13,824"]
    assert table[5].split() == ["192", "s", "asynchronous", "1", "ranks", "89,", "recompute"]
    assert table[6:] == [
        "  carry, asynchronous: with algorithm.* as in configs/algorithms/decoupled.yaml",
        "  defer: assumed is that a prompt has 70% of the variance of log-lengths",
        "Predicted fastest: carry with max_staleness 1",
    ]
    assert main([*told, "--search-tails"]) == 0
    searched = tail_table(capsys.readouterr().out)
    assert searched[:4] == table[:4]
    assert [line.split()[3:5] for line in searched[4:8]] == [
        ["2", "18,432"],
        ["3", "13,824"],
        ["5", "9,216"],
        ["7", "6,912"],
    ]
    assert searched[7].split()[:3] == ["119", "s", "carry"]
    assert searched[8] == table[4]
    assert searched[9].split() == ["249", "s", "defer", "9,216", "deferred", "71%,", "discarded", "39%"]
    assert searched[10] == table[5]
    assert [line.split()[:4] + line.split()[5:6] for line in searched[11:14]] == [
        ["153", "s", "asynchronous", "2", "96,"],
        ["124", "s", "asynchronous", "4", "96,"],
        ["113", "s", "asynchronous", "8", "93,"],
    ]
    assert searched[-1] == "Predicted fastest: asynchronous with ranks 93, max_staleness 8"
    assert all(len(line) <= 80 for line in searched)


@matrix
@pytest.mark.parametrize(
    ("minibatches", "name"), [(4, "step, 4 minibatches"), (1, "step, `algorithm.n_minibatches=1`")]
)
def test_the_page_has_the_steps_of_the_longest_tail(
    minibatches: int, name: str, capsys: pytest.CaptureFixture[str]
):
    told = ("--config", str(CONFIGS / "areal/1.5b_n16.yaml"), f"algorithm.n_minibatches={minibatches}")
    tails = planned(capsys, *told, "--search-tails")["tails"]
    wait, *found = (one for one in tails if one["tail"] in ("wait", "carry"))
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    rows = {
        name: [f"{one['step_seconds']:.0f}" for one in (wait, *found)],
        "mean age of a token, steps": ["0", *(f"{one['staleness']:.1f}" for one in found)],
        "`slice_tokens`": ["", *(f"{one['slice_tokens']:,}" for one in found)],
        "groups in flight": ["512", *(f"{one['max_groups_in_flight']:,}" for one in found)],
    }
    for first, others in rows.items():
        assert "| " + " | ".join([first, *others]).replace("|  |", "| |") + " |" in page


def test_a_run_that_carries_has_its_own_plan(capsys: pytest.CaptureFixture[str]):
    told = ("--config", str(CONFIGS / "areal/1.5b_n16.yaml"))
    plan = planned(capsys, *told, *CARRYING)
    wait, carry, _, asynchronous = plan["tails"]
    assert plan["step_seconds"] == pytest.approx(carry["step_seconds"]) and carry == plan["fastest_tail"] | {
        "step_seconds": carry["step_seconds"]
    }
    assert wait["tail"] == "wait" and wait["step_seconds"] > carry["step_seconds"]
    assert asynchronous["tail"] == "asynchronous" and asynchronous["step_seconds"] > carry["step_seconds"]
    assert "logprobs" in plan["stages"][0]["seconds"]
    assert main([*told, *CARRYING, "--layouts", "0"]) == 0
    out = capsys.readouterr().out
    assert "  in 1 round, for which it prefills 141,696 sampled tokens again\n" in out
    assert "  a token is learned 0.5 steps after it was sampled on average, 1 at most\n" in out


def test_a_run_that_defers_has_its_own_plan(capsys: pytest.CaptureFixture[str]):
    told = ("--config", str(CONFIGS / "areal/1.5b_n16.yaml"), "rollout.tail=defer")
    plan = planned(capsys, *told)
    wait, _, defer, _ = plan["tails"]
    assert plan["step_seconds"] == pytest.approx(defer["step_seconds"]) and wait["tail"] == "wait"
    assert (defer["tail"], defer["slice_tokens"]) == ("defer", 13824)
    assert 0.3 < defer["discarded"] < defer["deferred"] < 0.6
    assert "logprobs" not in plan["stages"][0]["seconds"]
    assert main([*told, "--layouts", "0"]) == 0
    out = capsys.readouterr().out
    told = "rounds; 49% of the groups are sampled anew, and 39% of the sampled tokens are discarded\n"
    assert told in out


ASYNCHRONOUS = ("--config", str(CONFIGS / "areal/1.5b_n16.yaml"), "rollout.max_staleness=8")


@matrix
def test_engines_on_as_many_ranks_as_are_predicted_fastest(capsys: pytest.CaptureFixture[str]):
    """The plan is that of a run whose settings say so, with `rollout.ranks` or with the layout word."""
    plan = planned(capsys, *ASYNCHRONOUS, "--asynchronous")
    (stage,) = plan["stages"]
    overlap = stage["overlap"]
    assert (overlap["engine_ranks"], overlap["trainers"], overlap["take_turns"]) == (93, 35, False)
    assert plan["step_seconds"] == max(overlap["engine_seconds"], overlap["trainer_seconds"])
    assert overlap["floor"] == sum(overlap["floor_parts"]) < plan["step_seconds"]
    assert len(plan["splits"]) == 127 and plan["step_seconds"] == min(
        one["step_seconds"] for one in plan["splits"]
    )
    (found,) = (one for one in plan["splits"] if one["step_seconds"] == plan["step_seconds"])
    assert found["ranks"] == 93 and plan["fastest_tail"]["tail"] == "asynchronous"
    decoupled = ("--config", str(CONFIGS / "algorithms/decoupled.yaml"))
    for said in (
        ("rollout.ranks=93", "--nodes", "16"),
        ("parallel=d93+d35",),
        ("parallel=sglang.d93t1p1+d35p1",),
    ):
        own = planned(capsys, *ASYNCHRONOUS, *decoupled, *said)
        assert own["stages"] == plan["stages"] and own["splits"] == plan["splits"]
    turns = planned(capsys, *ASYNCHRONOUS)
    assert turns["splits"] == [] and turns["stages"][0]["overlap"] is None


def test_the_page_has_the_plan_of_engines_on_ranks_of_their_own(capsys: pytest.CaptureFixture[str]):
    assert main([*ASYNCHRONOUS, "--asynchronous", "--layouts", "0"]) == 0
    out = capsys.readouterr().out
    assert "TP1 x PP1 x DP35, 93 engines of TP1 on ranks of their own" in out
    first = out.index("Predicted seconds, of both sides at the same time:")
    told = out[first : out.index("\n\nPredicted step by rollout.tail")]
    floor, splits = (
        "floor           64.5  keys and values 43.4, update 21.2, on all 128 ranks",
        told.splitlines()[-7:],
    )
    assert floor in told and [line.split()[0] for line in splits[1:]] == ["32", "64", "80", "93", "96", "112"]
    assert splits[4].endswith("  fastest, as configured") and "fastest" not in "".join(
        splits[:4] + splits[5:]
    )
    assert told in (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert all(len(line) <= 80 for line in told[told.index("  trainers") :].splitlines())


@matrix
@pytest.mark.parametrize("on_new_weights", ["recompute", "keep"])
@pytest.mark.parametrize(("minibatches", "name"), [(4, "4 minibatches"), (1, "`algorithm.n_minibatches=1`")])
def test_the_page_has_the_steps_of_engines_on_ranks_of_their_own(
    on_new_weights: str, minibatches: int, name: str, capsys: pytest.CaptureFixture[str]
):
    told = (f"rollout.on_new_weights={on_new_weights}", f"algorithm.n_minibatches={minibatches}")
    tails = planned(capsys, "--config", str(CONFIGS / "areal/1.5b_n16.yaml"), "--search-tails", *told)[
        "tails"
    ]
    found = [one for one in tails if one["tail"] == "asynchronous"]
    assert [one["max_staleness"] for one in found] == [1, 2, 4, 8]
    row = [f'"{on_new_weights}", {name}', *(f"{one['step_seconds']:.0f} ({one['ranks']})" for one in found)]
    assert "| " + " | ".join(row) + " |" in (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert (found[-1]["step_seconds"] <= 105) is (on_new_weights == "keep")


def test_a_run_whose_engines_could_not_live_in_its_training_ranks_has_no_tails(
    capsys: pytest.CaptureFixture[str],
):
    """3 ranks that train, with engines of 2 beside them: all 7 together are no whole number of engines."""
    own = ("parallel=d2t2+d3", "rollout.max_staleness=0", "rollout.tensor_parallel=2")
    assert main(["--config", str(CONFIGS / "areal/1.5b_n1.yaml"), *own, "--layouts", "0"]) == 0
    assert "rollout.tail is not compared: engines in the training ranks" in capsys.readouterr().out
    plan = planned(capsys, "--config", str(CONFIGS / "areal/1.5b_n1.yaml"), *own)
    assert plan["tails"] == [] and plan["fastest_tail"] is None and plan["stages"][0]["overlap"]["take_turns"]


def test_the_fastest_layout_comes_first(capsys: pytest.CaptureFixture[str]):
    assert main(["--config", str(CONFIGS / "areal/7b_n4.yaml"), "--layouts", "100", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    seconds = [row["step_seconds"] for row in data["layouts"]]
    assert len(seconds) > 10 and seconds == sorted(seconds)
    (own,) = [row for row in data["layouts"] if row["layout"] == "TP2 x PP1 x DP16, 32 engines of TP1"]
    assert own["step_seconds"] == pytest.approx(data["step_seconds"])


def test_data_that_a_config_file_names_are_counted(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
):
    rows = [{"prompt": f"{n}+1=", "task": "math", "query_id": str(n), "solutions": ["1"]} for n in range(35)]
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = tmp_path / "my.yaml"
    config.write_text(f"data:\n  train_path: {train}\n  prompts_per_step: 8\n", encoding="utf-8")
    short = ("run.device=cpu", "data.max_prompt_tokens=16", "rollout.max_new_tokens=16")
    assert planned(capsys, "--config", str(config), model, *short)["steps_per_epoch"] == 4


@pytest.mark.parametrize(("wrong", "hint"), [("--gpu=H100", False), ("--run.seed=7", True)])
def test_dashes_are_told_of_where_an_option_is_unknown(
    capsys: pytest.CaptureFixture[str], wrong: str, hint: bool
):
    with pytest.raises(SystemExit):
        main([wrong])
    assert ("without dashes" in capsys.readouterr().err) is hint


def test_more_nodes_are_not_slower(capsys: pytest.CaptureFixture[str]):
    def seconds(nodes: int) -> float:
        told = ("--config", str(CONFIGS / "areal/7b_n4.yaml"), "--nodes", str(nodes))
        return planned(capsys, *told)["step_seconds"]

    found = [seconds(nodes) for nodes in (2, 4, 8, 16, 32, 64)]
    assert found == sorted(found, reverse=True)
    assert (
        found[1] < 0.7 * found[0] and found[5] > 0.7 * found[4]
    )  # in the end only the longest answer is left


def test_longer_answers_are_slower(capsys: pytest.CaptureFixture[str]):
    def seconds(mean: int) -> float:
        told = ("--config", str(CONFIGS / "areal/1.5b_n1.yaml"), "--mean-response-tokens", str(mean))
        return planned(capsys, *told)["step_seconds"]

    found = [seconds(mean) for mean in (1000, 4000, 16000)]
    assert found == sorted(found) and found[2] > 5 * found[0]


def test_a_faster_gpu_and_a_faster_network_are_faster(capsys: pytest.CaptureFixture[str]):
    told = ("--config", str(CONFIGS / "areal/7b_n16.yaml"))
    usual = planned(capsys, *told)["step_seconds"]
    assert planned(capsys, *told, "--gpu", "H200-141GB")["step_seconds"] < usual
    assert planned(capsys, *told, "--network-gbps", "10")["step_seconds"] > usual + 1


def test_what_does_not_fit_is_told_with_its_plan(capsys: pytest.CaptureFixture[str]):
    told = ["--config", str(CONFIGS / "areal/32b_n16.yaml"), "parallel=d128t1p1", "--layouts", "0"]
    assert main(told) == 2
    out, err = capsys.readouterr()
    assert "Predicted seconds:" in out and "memory: rank 0" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["memory.gpu=null", "memory.gpu_gib=80"], "the speed of a GPU that has no name is not known"),
        (["parallel.tensor=3"], "parallel.tensor"),
        (["--nodes", "0"], "needed: at least 1 of each"),
        (["--network-gbps", "0"], "needed: above 0"),
        (["--mean-response-tokens", "30000"], "needed: from 1 to the longest, 27648"),
        (["--mean-prompt-tokens", "2000"], "needed: from 1 to data.max_prompt_tokens, 1024"),
        (["--prompts", "100"], "needed: at least data.prompts_per_step"),
        (["--nodes", "1", "--gpus-per-node", "0"], "needed: at least 1 of each"),
        (["memory.gpu=H100"], 'memory.gpu is "H100"'),
        (["--gpus-per-node", "3"], "8 ranks do not fill nodes of 3"),
        (
            ["rollout.tail=carry", "algorithm.recompute_logprobs=true"],
            "algorithm.importance_mask_high=5 (or algorithm.importance_cap)",
        ),
        (
            ["rollout.tail=carry", "rollout.max_staleness=0", "rollout.max_groups_in_flight=513"],
            "rollout.max_groups_in_flight is 513",
        ),
        (
            ["rollout.ranks=8", "--nodes", "1"],
            "rollout.ranks is 8, and the run has 8 ranks: none is left to train",
        ),
        (["parallel=d4+", "--nodes", "1"], "generation before the plus sign and training behind it"),
        (
            ["parallel=d4+d4", "algorithm.recompute_logprobs=true"],
            "algorithm.importance_mask_high=5 (or algorithm.importance_cap)",
        ),
        (
            ["--asynchronous", "--nodes", "1", "--gpus-per-node", "1"],
            "the run has 1 rank; needed: more than the 1 of",
        ),
        (
            ["--asynchronous", "parallel=t2", "--nodes", "1", "--gpus-per-node", "2"],
            "parallel.tensor x parallel.pipeline is 2 x 1 = 2, which does not divide the 1 rank that trains",
        ),
        (
            ["--asynchronous", "--gpu", "L40S-48GB", "rollout.memory_share=0.05"],
            "no split of the 8 ranks fits",
        ),
        (["--write-coefficients", "x.json"], "give --calibrate, too"),
        (["--coefficients", "nowhere.json"], "nowhere.json cannot be read"),
        (["--calibrate", "nowhere/metrics.jsonl"], "there is no config.yaml"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["--config", str(CONFIGS / "areal/1.5b_n1.yaml"), *arguments]) == 2
    assert told in capsys.readouterr().err


def test_every_gpu_that_memory_gpu_may_name_has_its_figures():
    assert tuple(GPUS) == typing.get_args(GpuName)


@matrix
def test_the_published_table_is_met_as_the_page_says(capsys: pytest.CaptureFixture[str]):
    assert main(["--published"]) == 0
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    out = capsys.readouterr().out
    assert f"```\n{out}```\n" in page
    assert abs(largest_error([row.error for row in published(TABLE)])) < 0.25


@matrix
def test_the_page_has_the_steps_of_deferring():
    """By the share of a length's variance that is the prompt's; update, sync and switch are those of waiting."""
    ((_, tails),) = tails_of(TABLE[2:3])
    config, shape, target, machine, coefficients = recipe_of(TABLE[2])
    wait = tails.wait
    rows: dict[str, list[str]] = {
        "groups deferred": [],
        "sampled tokens discarded": [],
        "step, 16 completions a prompt": [],
    }
    for share in (0, 0.5, 0.7, 0.8, 0.9, 1):
        found = deferring_rollout_of(
            deferring(config, None), shape, target, wait.cluster, wait.batch, wait.cluster.ranks, share
        )
        assert found.defer is not None
        rest = wait.step_seconds - wait.seconds["rollout"]
        step = rest + seconds_of(found.work, machine, coefficients)
        told = (f"{found.defer.deferred:.0%}", f"{found.defer.discarded:.0%}", f"{step:.0f}")
        for row, value in zip(rows.values(), told, strict=True):
            row.append(value)
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    for first, others in rows.items():
        assert "| " + " | ".join([first, *others]) + " |" in page
    assert tails.defer.step_seconds > wait.step_seconds, "with what is assumed"


def test_published_rows_have_the_gpus_of_their_nodes():
    for row in TABLE:
        assert row.sampling[0] + row.training[0] == 8 * row.nodes
    for row in COLOCATED:
        assert row.sampling[0] == row.training[0] == 8 * row.nodes
