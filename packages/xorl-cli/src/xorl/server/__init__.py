"""The service: training and sampling for clients, call by call. Nothing is imported here: few processes load torch."""
