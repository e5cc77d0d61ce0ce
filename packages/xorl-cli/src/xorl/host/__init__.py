"""Processes on one host: locks and temporary folders that outlive no process that uses them."""
