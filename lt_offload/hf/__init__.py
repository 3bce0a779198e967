"""The HF Trainer, and those of TRL, on the engine: what they are is not changed, where weights are is.

``context`` lets Trainers that are made within it be such ones, ``trainer`` is what they do differently, ``run`` is the
life of one training, ``step`` finds where its backward begins, ``head`` lets TRL's losses call the head. Imported where
``lt_offload.hf_trainer`` is used, and not before.
"""
