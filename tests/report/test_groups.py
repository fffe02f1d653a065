"""From runs to groups: what is read, which settings count, which runs compete, what is averaged or missing."""

from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.config.explain import key_owners
from mezo_cli.report.entries import read_runs
from mezo_cli.report.groups import group_runs
from mezo_cli.report.settings import IN_OTHER_COLUMNS, LIMIT, WITHOUT_EFFECT, changed_settings, method_name
from mezo_cli.report.tables import group_view, paper_view
from tests.report.run_directories import SEEDS, make_config, make_entry, make_grid, make_run, only_group


def test_each_run_is_found_once_also_inside_a_sweep(tmp_path: Path) -> None:
    make_run(tmp_path / "multirun" / "2026-01-01" / "0", {"seed": 1})
    make_run(tmp_path / "multirun" / "2026-01-01" / "1", {"seed": 2})
    entries, _ = read_runs([tmp_path, tmp_path / "multirun", tmp_path / "multirun" / "2026-01-01" / "1"])
    assert sorted(entry.config.seed for entry in entries) == [1, 2]


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
def test_shots_and_data_seed(settings: dict[str, Any], shots: int | None, seed: int) -> None:
    entry = make_entry(settings)
    assert (entry.shots, entry.data_seed) == (shots, seed)


LORA = {"peft.name": "lora", "peft.r": 8, "peft.alpha": 16, "peft.targets": "query_value"}
PREFIX = {"peft.name": "prefix", "peft.length": 5}
MOMENTUM = {"optimizer.name": "mezo_momentum"}
ADAM = {"optimizer.name": "mezo_adam"}
FIRST_ORDER = {"optimizer.name": "adamw", "optimizer.schedule": "linear"}


def test_every_key_of_the_schema_has_exactly_one_part() -> None:
    """A key that is new keeps runs apart until someone says otherwise; nothing is in two parts."""
    entry = make_entry({"data.name": "files", "data.dir": "/data"})
    apart, grid = set(entry.common), set(dict(entry.point))
    assert not apart & grid
    silent = set(key_owners()) - apart - grid
    named = (*WITHOUT_EFFECT, *LIMIT, *IN_OTHER_COLUMNS, "task.hub.")
    of_others = set(key_owners()) - set(entry.settings)  # of choices that the run has not made
    assert {key for key in silent if not key.startswith(named)} == of_others


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "MeZO"),
        ({"steps": 0}, "zero-shot"),
        ({"steps": 0, "init": "linear_probe"}, "LP"),
        ({"init": "linear_probe"}, "LP then MeZO"),
        (FIRST_ORDER, "FT"),
        ({**FIRST_ORDER, "optimizer.name": "sgd", "optimizer.momentum": 0.0}, "FT-SGD"),
        ({**LORA, "optimizer.weight_decay": 0.1}, "MeZO LoRA"),
        ({"peft.name": "head", "init": "linear_probe"}, "LP then MeZO head"),
        (MOMENTUM, "MeZO-momentum"),
        ({**ADAM, **LORA}, "MeZO-Adam LoRA"),
        ({**FIRST_ORDER, **PREFIX}, "FT prefix"),
        ({"objective": "lm", **LORA}, "MeZO LoRA"),
    ],
)
def test_names_of_methods(settings: dict[str, Any], name: str) -> None:
    assert method_name(make_config(settings)) == name
    assert only_group(make_entry(settings)).label == name  # and nothing about it is unusual


def test_only_what_differs_from_the_defaults_is_listed() -> None:
    assert changed_settings(make_config({})) == {}
    changed = changed_settings(build_config(["task=rte", "optimizer=adamw", "steps=5", "optimizer.lr=1e-3"]))
    assert changed.keys() == {"task", "optimizer", "optimizer.lr", "steps"}
    assert (*changed["optimizer.lr"].values(), *changed["steps"].values()) == (1e-3, 1e-5, 5, 100_000)


FEW = {"data.shots": 16}


def test_the_best_dev_of_each_data_seed_then_mean_and_population_std() -> None:
    small = {13: (0.9, 0.70), 21: (0.5, 0.99), 42: (0.8, 0.80)}
    large = {13: (0.8, 0.99), 21: (0.6, 0.90), 42: (0.7, 0.99)}
    group = only_group(*make_grid(FEW, {1e-7: small, 1e-6: large}))
    assert [dict(runs[0].point)["optimizer.lr"] for runs in group.picks.values()] == [1e-7, 1e-6, 1e-7]
    assert dict(group.tests) == pytest.approx({13: 0.70, 21: 0.90, 42: 0.80})
    assert group.dev == pytest.approx((0.9 + 0.6 + 0.8) / 3)
    assert group.mean == pytest.approx(0.8)
    assert group.std == pytest.approx((0.02 / 3) ** 0.5)  # ddof 0; the sample's would be 0.1


def test_one_seed_has_no_std_and_no_test_split_no_mean() -> None:
    group = only_group(make_entry(FEW, test=0.75))
    assert (group.mean, group.std) == (0.75, None)
    group = only_group(make_entry(dev=0.6, test=None))
    assert (group.dev, group.mean, dict(group.tests)) == (0.6, None, {})


@pytest.mark.parametrize("losses", [(0.5, 0.4), (0.4, 0.5)])
def test_a_tie_goes_to_the_lower_dev_loss_whatever_test_says(losses: tuple[float, float]) -> None:
    runs = [
        make_entry({"optimizer.lr": lr}, dev=0.7, dev_loss=loss, test=0.9 if loss == 0.5 else 0.1)
        for lr, loss in zip((1e-6, 1e-5), losses, strict=True)
    ]
    assert only_group(*runs).mean == 0.1


def test_a_tie_in_both_goes_to_the_smaller_lr() -> None:
    assert only_group(*(make_entry({"optimizer.lr": lr}, test=lr) for lr in (1e-5, 1e-7, 1e-6))).mean == 1e-7


def test_run_seeds_of_one_data_seed_do_not_compete_and_each_counts() -> None:
    def repeated(seed: int, dev: float, test: float) -> Any:
        return make_entry({"seed": seed, "data.seed": 13, "optimizer.lr": 1e-6}, dev=dev, test=test)

    other = make_entry({"seed": 1, "data.seed": 13, "optimizer.lr": 1e-5}, dev=0.8, test=0.2)
    runs = [repeated(1, 0.9, 0.5), repeated(2, 0.5, 0.7), other]
    assert dict(only_group(*runs).tests) == {13: 0.2}  # 0.8 against the mean of 0.9 and 0.5
    group = only_group(*runs, repeated(3, 1.0, 0.9), repeated(4, 1.0, 0.7))
    assert [score for _, score in group.tests] == [0.5, 0.7, 0.9, 0.7]
    assert (group.mean, group.std) == (pytest.approx(0.7), pytest.approx(0.02**0.5))
    assert group.chosen == ["lr=1e-06"]
    assert group.edges() == ["lr=1e-06 is at the edge of the grid: go on below 1e-06"]
    assert group.troubles == [
        "the seeds were not run on the same grid: seed 1 (data 13) at lr=1e-06; lr=1e-05 | seed 2 (data 13), "
        "seed 3 (data 13), seed 4 (data 13) at lr=1e-06"
    ]


def test_a_diverged_point_is_not_picked_and_a_diverged_seed_counts() -> None:
    def run(lr: float, seed: int, dev: float, verdict: str = "improved") -> Any:
        entry = make_entry({"seed": seed, "data.seed": 1, "optimizer.lr": lr}, dev=dev, test=dev)
        entry.verdict = verdict
        return entry

    high = [run(1e-4, seed, 0.9, "diverged") for seed in (1, 2, 3)]
    low = [run(1e-6, 1, 0.5), run(1e-6, 2, 0.6), run(1e-6, 3, 0.1, "diverged")]
    groups = group_runs([*high, *low])
    assert (groups[0].chosen, groups[0].mean, groups[0].diverged) == (["lr=1e-06"], pytest.approx(0.4), 1)
    (table,) = group_view(groups).tables
    assert (table.chosen[0], table.verdict[0]) == ("lr=1e-06", "2 improved, 1 diverged")
    assert only_group(*high).mean == pytest.approx(0.9)


def test_seeds_on_the_same_rows_are_one_data_seed_and_choose_one_point() -> None:
    def run(lr: float, seed: int, dev: float) -> Any:  # with fixed files data.seed follows seed and draws nothing
        entry = make_entry({"seed": seed, "data.seed": seed, "optimizer.lr": lr}, dev=dev)
        entry.data = "fixed"
        return entry

    runs = [run(1e-4, 1, 0.9), run(1e-4, 2, 0.5), run(1e-6, 1, 0.8), run(1e-6, 2, 0.8)]
    group = only_group(*runs)
    assert (list(group.picks), group.chosen, len(group.results)) == ([1], ["lr=1e-06"], 2)
    assert group.troubles + group.missing == []


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        (("improved", "improved"), ["lr=0.001 is at the edge of the grid: go on above 0.001"]),
        (("not_compared", "not_compared"), ["lr=0.001 is at the edge of the grid: go on above 0.001"]),
        (("within_noise", "not_improved"), ["no point of the grid is better than the untrained model by its interval"]),
        (("improved", "worse"), []),
    ],
)
def test_no_direction_is_given_where_nothing_was_learnt(verdicts: tuple[str, str], told: list[str]) -> None:
    runs = [make_entry({"optimizer.lr": lr}, dev=dev) for lr, dev in ((1e-4, 0.5), (1e-3, 0.6))]
    for entry, verdict in zip(runs, verdicts, strict=True):
        entry.verdict = verdict
    group = only_group(*runs)
    assert [text.partition(": no direction")[0] for text in group.edges()] == told
    assert group.verdict == verdicts[1]


def test_a_run_done_again_counts_once_and_the_newest_that_finished_wins() -> None:
    new = make_entry(test=0.8, dev=0.3, start="2026-01-02")
    old = make_entry(test=0.1, dev=0.9, start="2026-01-01")
    failed = make_entry(ended="no memory", start="2026-01-03")
    group = only_group(new, old, failed)
    assert dict(group.tests) == {42: 0.8}
    assert group.troubles == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("log_every", 1),
        ("checkpoint", "trajectory"),
        ("model.device", "cuda:1"),
        ("model.name", "mine"),
        ("logger.names", ["wandb"]),
        ("seed", 7),
        ("data.seed", 7),
    ],
)
def test_settings_without_effect_do_not_split_a_group(key: str, value: Any) -> None:
    assert len(only_group(make_entry(), make_entry({key: value})).points) == 1


@pytest.mark.parametrize(
    ("key", "value", "label"),
    [
        ("optimizer.noise", "rademacher", "MeZO (noise=rademacher)"),
        ("optimizer.samples", 4, "MeZO (samples=4)"),
        ("eval_every", 10, "MeZO (eval_every=10)"),
        ("model.compute_dtype", "bfloat16", "MeZO (model.compute_dtype=bfloat16)"),
        ("task.template", "{sentence} {mask}.", "MeZO (task.template={sentence} {mask}.)"),
        ("model.path", "other/roberta-large", "MeZO (model.path=other/roberta-large)"),
        ("steps", 100, "MeZO"),
        ("data.shots", 16, "MeZO"),
        ("objective", "cls", "MeZO"),
        ("task", "rte", "MeZO"),
    ],
)
def test_all_other_settings_split_groups_and_are_in_the_label(key: str, value: Any, label: str) -> None:
    groups = group_runs([make_entry(), make_entry({key: value})])
    assert label in {group.label for group in groups}
    looks = {(g.task, g.shots, g.model, g.objective, g.loss, g.label, g.steps) for g in groups}
    assert len(looks) == 2


def test_settings_that_a_method_does_not_read_do_not_split_a_group() -> None:
    other = {"steps": 0, "optimizer.noise": "rademacher", "optimizer.lr": 1.0}
    group = only_group(make_entry({"steps": 0}), make_entry(other))
    assert (group.label, group.shots) == ("zero-shot", 0)


def test_linear_probing_is_one_method_by_init_or_by_optimizer() -> None:
    probed = {"steps": 0, "init": "linear_probe", "data.shots": 16}
    runs = [make_entry({"optimizer.name": "linear_probe", **probed}), make_entry(probed)]
    group = only_group(*runs)
    assert (group.label, group.shots, len(group.missing)) == ("LP", 16, 4)
    groups = group_runs([*runs, make_entry({**probed, "probe_c": 2.0})])
    assert {group.label for group in groups} == {"LP", "LP (probe_c=2)"}


def test_the_data_source_splits_groups_and_prepared_folders_are_one() -> None:
    files = {"data.name": "files", "data.dir": "/elsewhere"}
    assert "data.dir=/elsewhere" in " ".join(group.label for group in group_runs([make_entry(), make_entry(files)]))
    folders = [{"data.name": "files", "data.dir": f"/k/SST-2/16-{seed}"} for seed in SEEDS]
    group = only_group(*(make_entry(folder) for folder in folders))
    assert (group.shots, sorted(dict(group.tests)), group.missing, group.troubles) == (16, sorted(SEEDS), [], [])


def test_with_the_papers_seeds_all_five_are_expected() -> None:
    group = only_group(*make_grid(FEW, {1e-6: {13: (0.5, 0.5), 42: (0.5, 0.5)}}))
    assert (group.missing, group.troubles) == ([21, 87, 100], [])
    assert any(note.endswith(": not run: seeds 21, 87, 100") for note in paper_view([group], 80).notes)


@pytest.mark.parametrize("settings", [{}, {"data.shots": 16, "data.seed": 5}, {"steps": 0, **FEW, "seed": 13}])
def test_with_other_seeds_all_rows_or_no_training_they_are_not(settings: dict[str, Any]) -> None:
    group = only_group(make_entry(settings))
    assert (group.missing, group.troubles) == ([], [])


def test_a_seed_that_another_method_has_on_the_same_data_is_missing_here() -> None:
    runs = [make_entry({"seed": 1, **FEW}), make_entry({"seed": 2, **FEW, "optimizer.noise": "rademacher"})]
    runs += [make_entry({"seed": 3, "data.shots": 8}), make_entry({"seed": 4, "data.name": "demo"})]
    missing = {(group.shots, group.demo): group.missing for group in group_runs(runs)}
    assert missing[8, False] == missing[None, True] == []
    assert [group.missing for group in group_runs(runs) if group.shots == 16] == [[2], [1]]


def test_failed_interrupted_and_running_seeds_are_noted_with_the_reason() -> None:
    ended = dict(zip(SEEDS, ("finished", "the loss is not finite", "interrupted", "running"), strict=False))
    group = only_group(
        *(make_entry({"seed": seed, **FEW, "steps": 9}, ended=end, steps_done=2) for seed, end in ended.items())
    )
    assert list(group.picks) == [13]
    assert group.missing == [21, 42, 87, 100]
    assert group.troubles == [
        "seed 21 failed (the loss is not finite)",
        "seed 42 interrupted at step 2 of 9",
        "seed 87 running at step 2 of 9",
    ]


def test_missing_points_of_the_grid_are_noted() -> None:
    runs = make_grid({}, {1e-6: {1: (0.5, 0.5), 2: (0.5, 0.5)}, 1e-5: {1: (0.5, 0.5)}})
    runs.append(make_entry({"optimizer.lr": 1e-5, "seed": 3}, ended="diverged"))
    assert only_group(*runs).troubles == [
        "lr=1e-05: seed 3 failed (diverged)",
        "the seeds were not run on the same grid: seed 1 at lr=1e-06; lr=1e-05 | seed 2 at lr=1e-06 | "
        "seed 3 at lr=1e-05",
    ]


def test_runs_on_other_rows_are_left_out_with_a_note() -> None:
    old = make_entry({"optimizer.lr": 1e-5}, dev=0.9, test=0.9, rows="old", start="2026-01-01")
    new = make_entry({"optimizer.lr": 1e-6}, dev=0.5, test=0.5, rows="new", start="2026-01-02")
    group = only_group(old, new)
    assert dict(group.tests) == {42: 0.5}
    assert group.troubles[0].startswith("seed 42: 1 of 2 runs had other data")
    assert old.location in group.troubles[0]
