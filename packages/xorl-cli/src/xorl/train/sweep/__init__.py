"""A sweep trains several adapters together on one frozen base, each as a separate run would."""
