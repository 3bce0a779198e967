"""The Lightning strategy ``"offmate"``: all that knows Trainers."""
