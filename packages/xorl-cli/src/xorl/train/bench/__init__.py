"""A benchmark: training steps of xorl and of other trainers in turn, timed, and the record of what they took."""
