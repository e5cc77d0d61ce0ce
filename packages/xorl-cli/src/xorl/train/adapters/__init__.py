"""Adapters of a run: put into its model, read from PEFT's files and written as such."""
