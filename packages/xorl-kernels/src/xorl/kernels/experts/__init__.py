"""Layers of experts: `routing` and `plan` assign tokens, `native` computes, and `reference` is its twin."""
