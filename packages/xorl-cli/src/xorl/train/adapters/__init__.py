"""The adapters of a run: adding them to its model, and reading and writing them in PEFT's format."""
