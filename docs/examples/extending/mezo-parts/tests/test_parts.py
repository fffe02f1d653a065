from mezo_cli.testing import objectives, optimizers


class TestMezoRms(optimizers.Conformance):
    name = "mezo_rms"
    lr = 0.3


class TestNullPrompt(objectives.Conformance):
    name = "null_prompt"
