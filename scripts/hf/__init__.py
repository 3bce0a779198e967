"""Runs of transformers' and TRL's Trainers, plain and offloaded, compared bit for bit."""
