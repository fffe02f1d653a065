"""The protocol: which runs compete, who wins, what is averaged, what is missing."""

from pathlib import Path
from typing import Any

import pytest

from mezo_cli import checks
from mezo_cli.compare import methods
from mezo_cli.compare.collect import collect
from mezo_cli.compare.groups import Group, gather
from mezo_cli.runs import Run
from tests.compare.made import SEEDS, composed, config_of, grid, made

FEW = {"data.shots": 16}
LORA = {"peft.name": "lora", "peft.r": 8, "peft.alpha": 16, "peft.targets": "query_value"}
PREFIX = {"peft.name": "prefix", "peft.length": 5}
MOMENTUM, ADAM = {"optimizer.name": "mezo_momentum"}, {"optimizer.name": "mezo_adam"}
FIRST_ORDER = {"optimizer.name": "adamw", "optimizer.schedule": "linear"}


def groups(root: Path) -> list[Group]:
    entries, warnings = collect([root])
    assert not warnings
    return gather(entries)


def only(root: Path) -> Group:
    (group,) = groups(root)
    return group


# --- picking ---


def test_the_best_dev_of_each_data_seed_then_mean_and_population_std(tmp_path: Path) -> None:
    grid(
        tmp_path,
        FEW,
        {
            1e-7: {13: (0.9, 0.70), 21: (0.5, 0.99), 42: (0.8, 0.80)},
            1e-6: {13: (0.8, 0.99), 21: (0.6, 0.90), 42: (0.7, 0.99)},
        },
    )
    group = only(tmp_path)
    assert {seed: pick.point[0] for seed, pick in group.picks.items()} == {
        13: ("optimizer.lr", 1e-7),
        21: ("optimizer.lr", 1e-6),
        42: ("optimizer.lr", 1e-7),
    }
    assert group.tests == pytest.approx({13: 0.70, 21: 0.90, 42: 0.80})
    assert group.dev == pytest.approx((0.9 + 0.6 + 0.8) / 3)
    assert group.mean == pytest.approx(0.8)
    assert group.std == pytest.approx((0.02 / 3) ** 0.5)  # ddof 0; the sample's would be 0.1


def test_one_seed_has_no_std(tmp_path: Path) -> None:
    made(tmp_path / "a", FEW, test=0.75)
    group = only(tmp_path)
    assert (group.mean, group.std) == (0.75, None)


@pytest.mark.parametrize("losses", [(0.5, 0.4), (0.4, 0.5)])
def test_a_tie_goes_to_the_lower_dev_loss_whatever_test_says(losses: tuple[float, float], tmp_path: Path) -> None:
    for lr, loss in zip((1e-6, 1e-5), losses, strict=True):
        made(tmp_path / str(lr), {"optimizer.lr": lr}, dev=0.7, dev_loss=loss, test=0.9 if loss == 0.5 else 0.1)
    assert only(tmp_path).mean == 0.1


def test_a_tie_in_both_goes_to_the_smaller_lr(tmp_path: Path) -> None:
    for lr in (1e-5, 1e-7, 1e-6):
        made(tmp_path / str(lr), {"optimizer.lr": lr}, test=lr)
    assert only(tmp_path).mean == 1e-7


def test_run_seeds_of_one_data_seed_are_averaged_and_do_not_compete(tmp_path: Path) -> None:
    for seed, dev, test in ((1, 0.9, 0.5), (2, 0.5, 0.7)):
        made(tmp_path / f"a{seed}", {"seed": seed, "data.seed": 13, "optimizer.lr": 1e-6}, dev=dev, test=test)
    made(tmp_path / "b", {"seed": 1, "data.seed": 13, "optimizer.lr": 1e-5}, dev=0.8, test=0.2)
    group = only(tmp_path)
    assert group.tests == {13: 0.2}  # 0.8 against the mean of 0.9 and 0.5
    (tmp_path / "more").mkdir()
    made(tmp_path / "more" / "a3", {"seed": 3, "data.seed": 13, "optimizer.lr": 1e-6}, dev=1.0, test=0.9)
    made(tmp_path / "more" / "a4", {"seed": 4, "data.seed": 13, "optimizer.lr": 1e-6}, dev=1.0, test=0.7)
    assert only(tmp_path).tests == pytest.approx({13: 0.7})
    assert len(only(tmp_path).picks[13].entries) == 4


def test_the_task_s_own_metric_decides(tmp_path: Path) -> None:
    run = made(tmp_path / "a", {"task": "mrpc"}, dev=0.6, test=0.6)
    summary = run.results()
    run.summary({**summary, "dev": {**summary["dev"], "f1": 0.81}, "test": {**summary["test"], "f1": 0.82}})
    group = only(tmp_path)
    assert (group.metric, group.dev, group.mean) == ("f1", 0.81, 0.82)


def test_a_run_without_a_test_split_counts_in_dev_only(tmp_path: Path) -> None:
    made(tmp_path / "a", dev=0.6, test=None)
    group = only(tmp_path)
    assert (group.dev, group.mean, group.tests) == (0.6, None, {})


def test_a_run_done_again_counts_once_and_the_newest_wins(tmp_path: Path) -> None:
    made(tmp_path / "new", test=0.8, dev=0.3, start="2026-01-02T00:00:00+00:00")
    made(tmp_path / "old", test=0.1, dev=0.9, start="2026-01-01T00:00:00+00:00")
    made(tmp_path / "newest", ended="no memory", start="2026-01-03T00:00:00+00:00")
    group = only(tmp_path)
    assert group.tests == {42: 0.8}
    assert group.troubles == []


# --- grouping ---


def split(root: Path, one: dict[str, Any], other: dict[str, Any]) -> int:
    made(root / "one", one)
    made(root / "other", other)
    return len(groups(root))


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer.lr", 1e-3), ("optimizer.eps", 1e-2), ("batch_size", 8), ("optimizer.weight_decay", 0.1)],
)
def test_the_grid_varies_inside_a_group(key: str, value: float, tmp_path: Path) -> None:
    assert split(tmp_path, {}, {key: value}) == 1
    assert len(only(tmp_path).grid) == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("log_every", 1),
        ("eval_batch_size", 8),
        ("checkpoint", "trajectory"),
        ("model.device", "cuda:1"),
        ("model.name", "mine"),
        ("logger.name", "wandb"),
        ("seed", 7),
        ("data.seed", 7),
    ],
)
def test_what_changes_no_result_keeps_nothing_apart(key: str, value: Any, tmp_path: Path) -> None:
    assert split(tmp_path, {}, {key: value}) == 1


@pytest.mark.parametrize(
    ("key", "value", "label"),
    [
        ("optimizer.noise", "rademacher", "MeZO (noise=rademacher)"),
        ("optimizer.samples", 4, "MeZO (samples=4)"),
        ("optimizer.schedule", "linear", "MeZO (schedule=linear)"),
        ("eval_every", 10, "MeZO (eval_every=10)"),
        ("model.compute_dtype", "bfloat16", "MeZO (model.compute_dtype=bfloat16)"),
        ("task.template", "{sentence} {mask}.", "MeZO (task.template={sentence} {mask}.)"),
        ("data.eval_limit", 100, "MeZO (data.eval_limit=100)"),
        ("model.path", "other/roberta-large", "MeZO (model.path=other/roberta-large)"),
        ("steps", 100, "MeZO"),
        ("data.shots", 16, "MeZO"),
        ("objective", "cls", "MeZO"),
        ("objective.loss", "accuracy", "MeZO"),
        ("task", "rte", "MeZO"),
    ],
)
def test_everything_else_does_and_the_method_says_it(key: str, value: Any, label: str, tmp_path: Path) -> None:
    assert split(tmp_path, {}, {key: value}) == 2
    assert label in {group.label for group in groups(tmp_path)}
    looks = {
        (group.task, group.shots, group.model, group.objective, group.loss, group.label, group.steps)
        for group in groups(tmp_path)
    }
    assert len(looks) == 2


def test_every_key_of_the_schema_has_its_part(tmp_path: Path) -> None:
    """A key that is new keeps runs apart until someone says otherwise; nothing is in two parts."""
    run = made(tmp_path / "a", {"data.name": "files", "data.dir": "/data"})
    (entry,) = collect([run.path])[0]
    apart, grid = set(methods.recipe(entry)), set(methods.setting(entry.config))
    assert not apart & grid
    silent = set(checks.all_keys()) - apart - grid
    named = (*methods.WITHOUT_EFFECT, *methods.TOLD_ELSEWHERE, "task.hub.")
    unread = {f"optimizer.{name}" for name in vars(entry.config.optimizer)} - {
        f"optimizer.{name}" for name in (*entry.config.method.reads, "name")
    }
    assert {key for key in silent if not key.startswith(named)} == unread


def test_what_a_method_does_not_read_keeps_nothing_apart(tmp_path: Path) -> None:
    assert split(tmp_path, {"steps": 0}, {"steps": 0, "optimizer.noise": "rademacher", "optimizer.lr": 1.0}) == 1
    assert only(tmp_path).label == "zero-shot"
    assert only(tmp_path).shots == 0


def test_linear_probing_is_one_method_however_it_is_asked_for(tmp_path: Path) -> None:
    probed = {"steps": 0, "init": "linear_probe", "data.shots": 16}
    assert split(tmp_path, {"optimizer.name": "linear_probe", **probed}, probed) == 1
    assert (only(tmp_path).label, only(tmp_path).shots, len(only(tmp_path).missing)) == ("LP", 16, 4)
    made(tmp_path / "c", {**probed, "probe_c": 2.0})
    assert {group.label for group in groups(tmp_path)} == {"LP", "LP (probe_c=2)"}


def test_the_source_of_the_data_keeps_runs_apart(tmp_path: Path) -> None:
    assert split(tmp_path, {}, {"data.name": "files", "data.dir": "/elsewhere"}) == 2
    assert "MeZO (data.dir=/elsewhere, data.name=files" in {g.label[:42] for g in groups(tmp_path)}


@pytest.mark.parametrize(
    ("settings", "shots", "seed"),
    [
        ({"seed": 7}, None, 7),
        ({"seed": 7, "data.seed": 13, "data.shots": 16}, 16, 13),
        ({"data.name": "files", "data.dir": "/k/SST-2/16-87"}, 16, 87),
        ({"data.name": "files", "data.dir": "/k/SST-2/512-13", "data.shots": 16, "data.seed": 21}, 16, 21),
        ({"data.name": "files", "data.dir": "/k/SST-2"}, None, 42),
    ],
)
def test_shots_and_data_seed(settings: dict[str, Any], shots: int | None, seed: int, tmp_path: Path) -> None:
    made(tmp_path / "a", settings)
    (entry,) = collect([tmp_path])[0]
    assert (entry.shots, entry.data_seed) == (shots, seed)


def test_prepared_folders_are_one_group(tmp_path: Path) -> None:
    for seed in SEEDS:
        made(tmp_path / str(seed), {"data.name": "files", "data.dir": f"/k/SST-2/16-{seed}"}, test=seed / 100)
    group = only(tmp_path)
    assert (group.shots, sorted(group.tests), group.missing, group.troubles) == (16, sorted(SEEDS), [], [])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "MeZO"),
        ({"steps": 0}, "zero-shot"),
        ({"steps": 0, "optimizer.name": "linear_probe", "init": "linear_probe"}, "LP"),
        ({"steps": 0, "init": "linear_probe"}, "LP"),
        ({"init": "linear_probe"}, "LP then MeZO"),
        (FIRST_ORDER, "FT"),
        ({**FIRST_ORDER, "optimizer.name": "sgd", "optimizer.momentum": 0.0}, "FT-SGD"),
        ({**FIRST_ORDER, "init": "linear_probe"}, "LP then FT"),
        ({**LORA, "optimizer.weight_decay": 0.1}, "MeZO LoRA"),
        (PREFIX, "MeZO prefix"),
        ({"peft.name": "head"}, "MeZO head"),
        ({"peft.name": "bias"}, "MeZO bias"),
        ({"peft.name": "head", "init": "linear_probe"}, "LP then MeZO head"),
        (MOMENTUM, "MeZO-momentum"),
        (ADAM, "MeZO-Adam"),
        ({**ADAM, **LORA}, "MeZO-Adam LoRA"),
        ({**FIRST_ORDER, **PREFIX}, "FT prefix"),
        ({"objective": "lm", **LORA}, "MeZO LoRA"),
    ],
)
def test_names_of_methods(settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    assert methods.method(config_of(settings)) == name
    made(tmp_path / "a", settings)
    assert only(tmp_path).label == name  # and nothing about it is unusual


@pytest.mark.parametrize(
    ("method", "setting", "label"),
    [
        ({}, {"optimizer.samples": 4}, "MeZO (samples=4)"),
        (
            {},
            {"optimizer.samples": 4, "optimizer.sample_schedule": "linear"},
            "MeZO (samples=4, sample_schedule=linear)",
        ),
        (LORA, {"peft.r": 4}, "MeZO LoRA (r=4)"),
        (LORA, {"peft.alpha": 8}, "MeZO LoRA (alpha=8)"),
        (LORA, {"peft.targets": "attention_feed_forward"}, "MeZO LoRA (targets=attention_feed_forward)"),
        (PREFIX, {"peft.length": 2}, "MeZO prefix (length=2)"),
        (MOMENTUM, {"optimizer.window": 8}, "MeZO-momentum (window=8)"),
        (MOMENTUM, {"optimizer.momentum": 0.5}, "MeZO-momentum (momentum=0.5)"),
        (ADAM, {"optimizer.beta1": 0.8}, "MeZO-Adam (beta1=0.8)"),
        (ADAM, {"optimizer.beta2": 0.99}, "MeZO-Adam (beta2=0.99)"),
        (ADAM, {"optimizer.adam_eps": 1e-6}, "MeZO-Adam (adam_eps=1e-06)"),
        (
            ADAM,
            {"optimizer.noise": "rademacher", "optimizer.window": 4},
            "MeZO-Adam (noise=rademacher, window=4)",
        ),
    ],
)
def test_a_setting_of_the_method_keeps_runs_apart_and_is_told_where_it_is_unusual(
    method: dict[str, Any], setting: dict[str, Any], label: str, tmp_path: Path
) -> None:
    made(tmp_path / "usual", method)
    made(tmp_path / "other", {**method, **setting})
    usual = methods.method(config_of(method))
    assert [group.label for group in groups(tmp_path)] == [usual, label]


def test_the_defaults_are_the_papers_so_nothing_is_unusual() -> None:
    assert methods.method(composed()) == "MeZO"


# --- what is missing ---


def test_with_the_papers_seeds_all_five_are_expected(tmp_path: Path) -> None:
    grid(tmp_path, FEW, {1e-6: {13: (0.5, 0.5), 42: (0.5, 0.5)}})
    group = only(tmp_path)
    assert group.missing == [21, 87, 100]
    assert group.troubles == ["not run: seeds 21, 87, 100"]


@pytest.mark.parametrize("settings", [{}, {"data.shots": 16, "data.seed": 5}])
def test_with_other_seeds_or_all_rows_they_are_not(settings: dict[str, Any], tmp_path: Path) -> None:
    made(tmp_path / "a", settings)
    assert only(tmp_path).missing == []


def test_a_seed_that_another_method_has_is_missing_here(tmp_path: Path) -> None:
    made(tmp_path / "a", {"seed": 1, "data.shots": 16})
    made(tmp_path / "b", {"seed": 2, "data.shots": 16, "optimizer.noise": "rademacher"})
    made(tmp_path / "c", {"seed": 3, "data.shots": 8})
    assert [(group.shots, group.missing) for group in groups(tmp_path)] == [(8, []), (16, [2]), (16, [1])]


def test_the_demo_s_seeds_are_not_asked_of_real_data(tmp_path: Path) -> None:
    made(tmp_path / "a", {"seed": 1, "data.name": "demo"})
    made(tmp_path / "b", {"seed": 2})
    assert [group.missing for group in groups(tmp_path)] == [[], []]


def test_a_zero_shot_score_is_the_same_on_every_seed(tmp_path: Path) -> None:
    made(tmp_path / "a", {"steps": 0, "data.shots": 16, "seed": 13})
    assert (only(tmp_path).missing, only(tmp_path).troubles) == ([], [])


def test_seeds_that_failed_stopped_or_still_run_are_told_with_why(tmp_path: Path) -> None:
    for seed, ended in zip(SEEDS, ("finished", "the loss is not finite", "interrupted", "running", ""), strict=True):
        if ended:
            kept = made(tmp_path / str(seed), {"seed": seed, **FEW, "steps": 9}, ended=ended, grads=(1.0, 2.0))
    group = only(tmp_path)
    assert list(group.picks) == [13]
    assert group.missing == [21, 42, 87, 100]
    assert group.troubles == [
        "not run: seed 100",
        "seed 21 failed (the loss is not finite)",
        "seed 42 interrupted at step 2 of 9",
        "seed 87 running at step 2 of 9",
    ]
    assert kept.status() == "running"


def test_holes_in_the_grid_are_told(tmp_path: Path) -> None:
    grid(tmp_path, {}, {1e-6: {1: (0.5, 0.5), 2: (0.5, 0.5)}, 1e-5: {1: (0.5, 0.5)}})
    made(tmp_path / "x", {"optimizer.lr": 1e-5, "seed": 3}, ended="diverged")
    assert only(tmp_path).troubles == [
        "lr=1e-06: not run: seed 3",
        "lr=1e-05: not run: seed 2",
        "lr=1e-05: seed 3 failed (diverged)",
    ]


def test_runs_on_other_rows_are_left_out_and_told(tmp_path: Path) -> None:
    made(tmp_path / "old", {"optimizer.lr": 1e-5}, dev=0.9, test=0.9, rows="old", start="2026-01-01T00:00:00+00:00")
    made(tmp_path / "new", {"optimizer.lr": 1e-6}, dev=0.5, test=0.5, start="2026-01-02T00:00:00+00:00")
    group = only(tmp_path)
    assert group.tests == {42: 0.5}
    assert "seed 42: 1 of 2 runs had other data than the newest and are left out" in group.troubles[0]


# --- reading ---


def test_a_run_is_found_once_and_below_sweeps(tmp_path: Path) -> None:
    made(tmp_path / "multirun" / "2026-01-01" / "0", {"seed": 1})
    made(tmp_path / "multirun" / "2026-01-01" / "1", {"seed": 2})
    entries, _ = collect([tmp_path, tmp_path / "multirun", tmp_path / "multirun" / "2026-01-01" / "1"])
    assert sorted(entry.config.seed for entry in entries) == [1, 2]


def damage(run: Run, name: str) -> None:
    file = run.path / name
    file.write_bytes(file.read_bytes().replace(b"0.5", b"0.6").replace(b"sst2", b"sst5").replace(b"finished", b"fin"))


@pytest.mark.parametrize("name", ["config.yaml", "run.json", "summary.json"])
def test_a_damaged_run_is_one_line(name: str, tmp_path: Path) -> None:
    damage(made(tmp_path / "a"), name)
    made(tmp_path / "b", {"seed": 1})
    entries, (warning,) = collect([tmp_path])
    assert [entry.config.seed for entry in entries] == [1]
    assert "is left out: " in warning
    assert "damaged" in warning
    assert "\n" not in warning


@pytest.mark.parametrize("name", ["config.yaml", "summary.json"])
def test_a_lost_file_is_too(name: str, tmp_path: Path) -> None:
    (made(tmp_path / "a").path / name).unlink()
    entries, (warning,) = collect([tmp_path])
    assert not entries
    assert str(tmp_path / "a") in warning


def test_someone_elses_directory_is_too(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "run.json").write_text('{"status": "finished"}')
    entries, (warning,) = collect([tmp_path])
    assert not entries
    assert "theirs is left out: " in warning


def test_a_summary_of_another_shape_is_too(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    run.summary({**run.results(), "test": {"accuracy": "high"}})
    entries, (warning,) = collect([tmp_path])
    assert not entries
    assert "summary.json is damaged: test lacks accuracy" in warning
