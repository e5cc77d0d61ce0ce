"""Failures of a job that a rank learns from others, told apart from its own by their types."""


class StalledError(RuntimeError):
    """No rank has made progress for too long."""


class LostRankError(RuntimeError):
    """Another rank has failed, or can no longer be reached."""
