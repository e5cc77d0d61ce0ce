"""Plans: what a run would need and how fast it would be, without its GPUs."""
