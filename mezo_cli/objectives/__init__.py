"""The objectives and the losses, by name. An objective scores labels, a loss compares the scores with the right labels.

Cross-entropy over the labels' scores is continuous, which gives MeZO its signal. Accuracy on a small batch seldom
differs between theta + eps z and theta - eps z, and the projected gradient is then exactly zero (paper, section 3.3:
it trains on accuracy with large batches).

The tables of names are in config/registry.py. Nothing here imports torch.
"""

from mezo_cli.config.registry import LOSSES, METRICS, OBJECTIVES
