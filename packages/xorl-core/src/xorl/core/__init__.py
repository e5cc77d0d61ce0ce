"""Models, losses, optimizers and parallelism. Import from the subpackages; this package exports nothing itself."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("xorl-core")
