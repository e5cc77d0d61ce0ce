"""Layers of experts: the implementations by name; `routing` and `plan` assign tokens, and `reference` is the twin."""

from xorl.kernels.experts.backends import EXPERTS, ExpertsFn, ExpertsRequest, products_name

__all__ = ["EXPERTS", "ExpertsFn", "ExpertsRequest", "products_name"]
