"""What a run tells while it trains: metrics, times of a step, progress, profiles, and why it diverged."""
