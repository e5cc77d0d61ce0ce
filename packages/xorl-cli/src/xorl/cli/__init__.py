"""The command line. Imports nothing, so that `xorl.cli.app` can respond before the rest is loaded."""
