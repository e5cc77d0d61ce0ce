"""Observability of a training run: metrics, step timing, progress, profiles, and diagnosis of divergence."""
