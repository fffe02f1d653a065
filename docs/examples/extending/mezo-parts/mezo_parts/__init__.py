"""An optimizer, an objective, a peft method, a loss, a metric and a model family."""
