"""The version of a task: named by every built-in task, 1 where a task or an old run does not give one."""

from pathlib import Path

import pytest
import yaml

from mezo_cli.config.choices import conf_dir
from mezo_cli.config.compose import build_config
from mezo_cli.config.stored import read_config
from mezo_cli.errors import UserError

OLD_RUNS = sorted((Path(__file__).parents[1] / "fixtures" / "runs").glob("*/config.yaml"))


def test_a_custom_task_may_leave_its_version_out(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    given = yaml.safe_load((conf_dir() / "task" / "mr.yaml").read_text(encoding="utf-8"))
    for version in (None, 3):
        fields = {key: value for key, value in {**given, "version": version}.items() if value is not None}
        (tmp_path / "task" / "mine.yaml").write_text(yaml.safe_dump(fields))
        assert build_config(["task=mine"], str(tmp_path)).task.version == (version or 1)
    with pytest.raises(UserError, match=r"task.version"):
        build_config(["task=mr", "task.version=0"])


@pytest.mark.parametrize("file", OLD_RUNS, ids=lambda file: file.parent.name)
def test_a_run_of_before_task_versions_reads_as_version_1(file: Path) -> None:
    assert "version" not in yaml.safe_load(file.read_text(encoding="utf-8"))["task"]
    assert read_config(file).task.version == 1
