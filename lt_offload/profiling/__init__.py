"""Measures what a model and a machine cost, or estimates it from a configuration: everything that makes a ``Profile``.

Nothing is loaded before it is used: a configuration of a plan needs no torch.
"""
