"""What others wrote, run on mezo: lm-evaluation-harness, torch's inputs of optimizers, llama.cpp's converter."""
