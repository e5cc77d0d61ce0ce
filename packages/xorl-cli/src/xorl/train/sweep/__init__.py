"""A sweep trains several adapters together on one frozen base, each as in a separate run."""
