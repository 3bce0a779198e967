"""The linear program of OFFMATE (2024), for several budgets, rounded to whole tensors and blocks."""
