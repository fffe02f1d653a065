"""The noise z, the trainable parameters and their update, and forwards with perturbed weights."""
