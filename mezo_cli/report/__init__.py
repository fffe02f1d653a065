"""Show runs and compare them with each other and with the paper. Reads run directories only: no model, no torch.

Tables are pandas' and figures matplotlib's. `document` and `terminal`, which `mezo show` needs, import neither.
"""
