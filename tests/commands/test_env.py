"""`mezo env`: what a bug report needs."""

from tests.command_line import mezo


def test_env_prints_versions_device_and_cores() -> None:
    said = mezo("env")
    assert said.code == 0
    names = {line.split()[0] for line in said.out.splitlines()}
    assert {"python", "torch", "transformers", "datasets", "hydra-core", "platform", "cores", "cuda"} <= names
