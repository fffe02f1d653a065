"""Directions that see the activations: a LoRA whose A is fixed, and estimates with a direction per row of the batch."""
