"""Kernels for training language models, each with a plain twin: attention over packed rows, loss without logits."""
