"""`xorl bench`: times training steps of xorl and of other trainers in turn, and records the results."""
