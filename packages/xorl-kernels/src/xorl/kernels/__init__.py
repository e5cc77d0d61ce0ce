"""Kernels for training language models, each with a plain twin in torch that defines its result."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("xorl-kernels")
