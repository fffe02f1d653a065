"""Parameter-efficient fine-tuning (PEFT): one module per method, with its settings; insert, save and load an adapter.

The methods are known without torch: settings are checked before a model is loaded. `adapter.py` needs it.
"""

from mezo_cli.adapters.base import PeftMethod

__all__ = ["PeftMethod"]
