"""What the process imports that jobs are forked from. No operation is run, which would start threads."""

import gc
import importlib

HEAVY = ("peft", "scipy.stats", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
OWN = ("commands.execute", "commands.resume", "commands.train", "training.loop", "training.finish")

for name in (*HEAVY, *(f"mezo_cli.{name}" for name in OWN)):
    importlib.import_module(name)
gc.collect()
gc.freeze()  # the memory of what is imported stays shared
