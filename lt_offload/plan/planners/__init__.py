"""Proposals of each method. A planner answers a request with decisions; others build, fit and simulate them."""
