"""Locks and temporary folders that are shared by the processes of a run on one host and outlive killed ones."""
