"""Trains a user-defined torch module without a configuration file: trainers, data loader, text, checkpoints."""
