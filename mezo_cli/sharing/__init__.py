"""Share a run: a Hugging Face folder with a model card, or the trajectory from which its weights are rebuilt."""
