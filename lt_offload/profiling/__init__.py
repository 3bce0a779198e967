"""Measurement of a model and a machine, or estimates from a configuration: everything that makes a ``Profile``.

Nothing is loaded before it is used: a configuration of a plan needs no torch.
"""
