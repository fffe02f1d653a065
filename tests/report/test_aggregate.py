"""The protocol: which runs compete, which one is picked, what is averaged, what is missing."""

from pathlib import Path
from typing import Any

import pytest

from tests.report.run_directories import SEEDS, make_grid, make_run, only_group, read_groups

FEW = {"data.shots": 16}


# --- picking ---


def test_the_best_dev_of_each_data_seed_then_mean_and_population_std(tmp_path: Path) -> None:
    make_grid(
        tmp_path,
        FEW,
        {
            1e-7: {13: (0.9, 0.70), 21: (0.5, 0.99), 42: (0.8, 0.80)},
            1e-6: {13: (0.8, 0.99), 21: (0.6, 0.90), 42: (0.7, 0.99)},
        },
    )
    group = only_group(tmp_path)
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
    make_run(tmp_path / "a", FEW, test=0.75)
    group = only_group(tmp_path)
    assert (group.mean, group.std) == (0.75, None)


@pytest.mark.parametrize("losses", [(0.5, 0.4), (0.4, 0.5)])
def test_a_tie_goes_to_the_lower_dev_loss_whatever_test_says(losses: tuple[float, float], tmp_path: Path) -> None:
    for lr, loss in zip((1e-6, 1e-5), losses, strict=True):
        make_run(tmp_path / str(lr), {"optimizer.lr": lr}, dev=0.7, dev_loss=loss, test=0.9 if loss == 0.5 else 0.1)
    assert only_group(tmp_path).mean == 0.1


def test_a_tie_in_both_goes_to_the_smaller_lr(tmp_path: Path) -> None:
    for lr in (1e-5, 1e-7, 1e-6):
        make_run(tmp_path / str(lr), {"optimizer.lr": lr}, test=lr)
    assert only_group(tmp_path).mean == 1e-7


def test_run_seeds_of_one_data_seed_are_averaged_and_do_not_compete(tmp_path: Path) -> None:
    for seed, dev, test in ((1, 0.9, 0.5), (2, 0.5, 0.7)):
        make_run(tmp_path / f"a{seed}", {"seed": seed, "data.seed": 13, "optimizer.lr": 1e-6}, dev=dev, test=test)
    make_run(tmp_path / "b", {"seed": 1, "data.seed": 13, "optimizer.lr": 1e-5}, dev=0.8, test=0.2)
    group = only_group(tmp_path)
    assert group.tests == {13: 0.2}  # 0.8 against the mean of 0.9 and 0.5
    (tmp_path / "more").mkdir()
    make_run(tmp_path / "more" / "a3", {"seed": 3, "data.seed": 13, "optimizer.lr": 1e-6}, dev=1.0, test=0.9)
    make_run(tmp_path / "more" / "a4", {"seed": 4, "data.seed": 13, "optimizer.lr": 1e-6}, dev=1.0, test=0.7)
    assert only_group(tmp_path).tests == pytest.approx({13: 0.7})
    assert len(only_group(tmp_path).picks[13].entries) == 4


def test_the_metric_of_the_task_decides(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", {"task": "mrpc"}, dev=0.6, test=0.6)
    summary = run.read_summary()
    run.write_summary({**summary, "dev": {**summary["dev"], "f1": 0.81}, "test": {**summary["test"], "f1": 0.82}})
    group = only_group(tmp_path)
    assert (group.metric, group.dev, group.mean) == ("f1", 0.81, 0.82)


def test_a_run_without_a_test_split_counts_in_dev_only(tmp_path: Path) -> None:
    make_run(tmp_path / "a", dev=0.6, test=None)
    group = only_group(tmp_path)
    assert (group.dev, group.mean, group.tests) == (0.6, None, {})


def test_a_run_done_again_counts_once_and_the_newest_wins(tmp_path: Path) -> None:
    make_run(tmp_path / "new", test=0.8, dev=0.3, start="2026-01-02T00:00:00+00:00")
    make_run(tmp_path / "old", test=0.1, dev=0.9, start="2026-01-01T00:00:00+00:00")
    make_run(tmp_path / "newest", ended="no memory", start="2026-01-03T00:00:00+00:00")
    group = only_group(tmp_path)
    assert group.tests == {42: 0.8}
    assert group.troubles == []


# --- grouping ---


def number_of_groups(root: Path, one: dict[str, Any], other: dict[str, Any]) -> int:
    make_run(root / "one", one)
    make_run(root / "other", other)
    return len(read_groups(root))


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer.lr", 1e-3), ("optimizer.eps", 1e-2), ("batch_size", 8), ("optimizer.weight_decay", 0.1)],
)
def test_the_grid_varies_inside_a_group(key: str, value: float, tmp_path: Path) -> None:
    assert number_of_groups(tmp_path, {}, {key: value}) == 1
    assert len(only_group(tmp_path).grid) == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("log_every", 1),
        ("eval_batch_size", 8),
        ("checkpoint", "trajectory"),
        ("model.device", "cuda:1"),
        ("model.name", "mine"),
        ("logger.names", ["wandb"]),
        ("seed", 7),
        ("data.seed", 7),
    ],
)
def test_settings_without_effect_do_not_split_a_group(key: str, value: Any, tmp_path: Path) -> None:
    assert number_of_groups(tmp_path, {}, {key: value}) == 1


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
def test_all_other_settings_split_groups_and_are_in_the_label(key: str, value: Any, label: str, tmp_path: Path) -> None:
    assert number_of_groups(tmp_path, {}, {key: value}) == 2
    assert label in {group.label for group in read_groups(tmp_path)}
    looks = {
        (group.task, group.shots, group.model, group.objective, group.loss, group.label, group.steps)
        for group in read_groups(tmp_path)
    }
    assert len(looks) == 2


def test_settings_that_a_method_does_not_read_do_not_split_a_group(tmp_path: Path) -> None:
    other = {"steps": 0, "optimizer.noise": "rademacher", "optimizer.lr": 1.0}
    assert number_of_groups(tmp_path, {"steps": 0}, other) == 1
    assert only_group(tmp_path).label == "zero-shot"
    assert only_group(tmp_path).shots == 0


def test_linear_probing_is_one_method_by_init_or_by_optimizer(tmp_path: Path) -> None:
    probed = {"steps": 0, "init": "linear_probe", "data.shots": 16}
    assert number_of_groups(tmp_path, {"optimizer.name": "linear_probe", **probed}, probed) == 1
    assert (only_group(tmp_path).label, only_group(tmp_path).shots, len(only_group(tmp_path).missing)) == ("LP", 16, 4)
    make_run(tmp_path / "c", {**probed, "probe_c": 2.0})
    assert {group.label for group in read_groups(tmp_path)} == {"LP", "LP (probe_c=2)"}


def test_the_data_source_splits_groups(tmp_path: Path) -> None:
    assert number_of_groups(tmp_path, {}, {"data.name": "files", "data.dir": "/elsewhere"}) == 2
    assert "MeZO (data.dir=/elsewhere, data.name=files" in {g.label[:42] for g in read_groups(tmp_path)}


def test_prepared_folders_are_one_group(tmp_path: Path) -> None:
    for seed in SEEDS:
        make_run(tmp_path / str(seed), {"data.name": "files", "data.dir": f"/k/SST-2/16-{seed}"}, test=seed / 100)
    group = only_group(tmp_path)
    assert (group.shots, sorted(group.tests), group.missing, group.troubles) == (16, sorted(SEEDS), [], [])


# --- what is missing ---


def test_with_the_papers_seeds_all_five_are_expected(tmp_path: Path) -> None:
    make_grid(tmp_path, FEW, {1e-6: {13: (0.5, 0.5), 42: (0.5, 0.5)}})
    group = only_group(tmp_path)
    assert group.missing == [21, 87, 100]
    assert group.troubles == ["not run: seeds 21, 87, 100"]


@pytest.mark.parametrize("settings", [{}, {"data.shots": 16, "data.seed": 5}])
def test_with_other_seeds_or_all_rows_they_are_not(settings: dict[str, Any], tmp_path: Path) -> None:
    make_run(tmp_path / "a", settings)
    assert only_group(tmp_path).missing == []


def test_a_seed_that_another_method_has_is_missing_here(tmp_path: Path) -> None:
    make_run(tmp_path / "a", {"seed": 1, "data.shots": 16})
    make_run(tmp_path / "b", {"seed": 2, "data.shots": 16, "optimizer.noise": "rademacher"})
    make_run(tmp_path / "c", {"seed": 3, "data.shots": 8})
    assert [(group.shots, group.missing) for group in read_groups(tmp_path)] == [(8, []), (16, [2]), (16, [1])]


def test_seeds_of_demo_runs_are_not_expected_of_real_data(tmp_path: Path) -> None:
    make_run(tmp_path / "a", {"seed": 1, "data.name": "demo"})
    make_run(tmp_path / "b", {"seed": 2})
    assert [group.missing for group in read_groups(tmp_path)] == [[], []]


def test_a_zero_shot_score_is_the_same_on_every_seed(tmp_path: Path) -> None:
    make_run(tmp_path / "a", {"steps": 0, "data.shots": 16, "seed": 13})
    assert (only_group(tmp_path).missing, only_group(tmp_path).troubles) == ([], [])


def test_failed_interrupted_and_running_seeds_are_noted_with_the_reason(tmp_path: Path) -> None:
    for seed, ended in zip(SEEDS, ("finished", "the loss is not finite", "interrupted", "running", ""), strict=True):
        if ended:
            kept = make_run(tmp_path / str(seed), {"seed": seed, **FEW, "steps": 9}, ended=ended, grads=(1.0, 2.0))
    group = only_group(tmp_path)
    assert list(group.picks) == [13]
    assert group.missing == [21, 42, 87, 100]
    assert group.troubles == [
        "not run: seed 100",
        "seed 21 failed (the loss is not finite)",
        "seed 42 interrupted at step 2 of 9",
        "seed 87 running at step 2 of 9",
    ]
    assert kept.status() == "running"


def test_missing_points_of_the_grid_are_noted(tmp_path: Path) -> None:
    make_grid(tmp_path, {}, {1e-6: {1: (0.5, 0.5), 2: (0.5, 0.5)}, 1e-5: {1: (0.5, 0.5)}})
    make_run(tmp_path / "x", {"optimizer.lr": 1e-5, "seed": 3}, ended="diverged")
    assert only_group(tmp_path).troubles == [
        "lr=1e-06: not run: seed 3",
        "lr=1e-05: not run: seed 2",
        "lr=1e-05: seed 3 failed (diverged)",
    ]


def test_runs_on_other_rows_are_left_out_with_a_note(tmp_path: Path) -> None:
    make_run(tmp_path / "old", {"optimizer.lr": 1e-5}, dev=0.9, test=0.9, rows="old", start="2026-01-01T00:00:00+00:00")
    make_run(tmp_path / "new", {"optimizer.lr": 1e-6}, dev=0.5, test=0.5, start="2026-01-02T00:00:00+00:00")
    group = only_group(tmp_path)
    assert group.tests == {42: 0.5}
    assert "seed 42: 1 of 2 runs had other data than the newest and are left out" in group.troubles[0]
