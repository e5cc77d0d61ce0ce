"""Models, losses, optimizers and parallelism. Import from the subpackages; this package exports nothing itself."""
