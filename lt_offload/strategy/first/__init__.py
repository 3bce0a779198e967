"""The first step of a run under a Trainer: it trains and is profiled, or is measured on trial before."""
