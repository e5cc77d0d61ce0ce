"""Training a module of one's own, without a configuration: trainers, loader, text, checkpoints."""
