"""An inference engine computes the forwards: its environment, the process in it, the protocol, and the label scores."""
