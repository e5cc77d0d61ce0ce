"""A sweep: several adapters that train together on one frozen base, each as in a run of its own."""
