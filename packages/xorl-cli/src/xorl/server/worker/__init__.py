"""The service's workers: rank 0 receives the work, and all ranks run the same operations in the same order."""
