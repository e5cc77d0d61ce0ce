"""Models, losses, optimizers, and their place on ranks. Nothing is imported here: each part is reached by its name."""
