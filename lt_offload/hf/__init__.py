"""Trainers of transformers and TRL on the engine. Their behaviour does not change, only the place of the weights does.

``context`` gives Trainers made within it another class, ``trainer`` holds the methods of that class, ``run`` is the
life of one training, ``step`` catches the start of its backward, ``head`` lets TRL's losses call the head. Nothing here
is imported before ``lt_offload.hf_trainer`` is used.
"""
