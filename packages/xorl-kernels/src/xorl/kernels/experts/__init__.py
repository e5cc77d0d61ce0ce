"""Layers of experts: routing and plan say where tokens go; native, and its plain twin reference, compute."""
