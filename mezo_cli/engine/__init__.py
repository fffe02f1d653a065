"""An inference engine computes the forwards: a server by HTTP, what it is asked, and the scores of labels and texts."""
