"""The programs in `examples`, as a rank of a test runs them."""

import logging
import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(script: Path, folder: Path) -> tuple[str, str]:
    """What this process writes to both outputs when it runs an example in a folder."""
    os.chdir(folder)
    sys.argv, sys.path[:0] = [str(script)], [str(script.parent)]
    # Those of pytest, beside which a script sets up none, and those of a command that a fixture ran before.
    for name in (None, "xorl"):
        logging.getLogger(name).handlers.clear()
    logging.getLogger("xorl").propagate = True
    logging.getLogger("xorl").setLevel(logging.NOTSET)
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue(), err.getvalue()
