"""The command line. Imports nothing, so that `xorl.cli.app` can respond before the rest is loaded."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("xorl-cli")
