"""The service: trains and samples for clients, call by call. Imports nothing, as most processes must not load torch."""
