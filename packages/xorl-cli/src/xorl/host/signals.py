"""The signals that ask a run to stop."""

import signal

# Schedulers send SIGTERM, or SIGUSR1 some time before they take the machine; Ctrl-C sends SIGINT.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A repeated signal counts only this much later: schedulers often signal both the ranks and their launcher, which
# forwards it to the ranks.
REPEATED_S = 3.0
