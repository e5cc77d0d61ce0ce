"""Kernels for training language models, each with a plain twin in torch that defines its result."""
