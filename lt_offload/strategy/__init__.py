"""The Lightning strategy ``"offmate"``: everything that deals with a Trainer."""
