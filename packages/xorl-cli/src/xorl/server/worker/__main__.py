"""`python -m xorl.server.worker --config FILE`: imports torch, and then runs `rank`."""

import sys

from xorl.host.imports import import_torch

if __name__ == "__main__":
    import_torch()
    from xorl.server.worker.rank import main

    sys.exit(main())
