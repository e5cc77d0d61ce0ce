"""The command line. Nothing is imported here: `xorl.cli.app` answers before the rest is loaded."""
