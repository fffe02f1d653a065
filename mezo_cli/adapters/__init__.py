"""Parameter-efficient fine-tuning (PEFT): the methods; insert, save and load an adapter."""

from mezo_cli.adapters.methods import PeftMethod
