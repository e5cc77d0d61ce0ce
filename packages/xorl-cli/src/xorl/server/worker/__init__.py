"""The workers of the service: rank 0 is asked, and all ranks do the same operations in the same order."""
