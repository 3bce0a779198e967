"""The classes that people and configs name, over the base classes of ``lightning.pytorch``."""

from lt_offload.strategy.checkpoint.resume import resume_class
from lt_offload.strategy.offmate import named_classes

OffmateStrategy, offmate = named_classes("lightning.pytorch")
ExactResume = resume_class("lightning.pytorch")
