"""The first step of a run under a Trainer: it trains, and shows what to plan; or it is measured aside."""
