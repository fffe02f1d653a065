"""What the process imports that jobs are forked from. No operation is run, which would start threads."""

import gc
import importlib

from mezo_cli.process.signals import import_libraries

import_libraries()
for name in ("commands.execute", "commands.resume", "commands.train", "training.loop", "training.finish"):
    importlib.import_module(f"mezo_cli.{name}")
gc.collect()
gc.freeze()  # the memory of what is imported stays shared
