"""All combinations that are refused, in one table, each with the reason and with what works instead.

A setting is refused where the strategy could not honour it exactly. :func:`check` raises from the table before training
starts, the documentation prints it, and a use that shows only while training runs raises its row's
:meth:`Limit.error`. Foreign optimizers are tried on a few small tensors.
"""

from lt_offload.limits import hf as _hf  # noqa: F401  its rows
from lt_offload.limits.accelerate import SEVERAL_TRAIN as SEVERAL_TRAIN
from lt_offload.limits.before import overridden as overridden
from lt_offload.limits.before import overrides as overrides
from lt_offload.limits.before import unknown_optimizer as unknown_optimizer
from lt_offload.limits.running import *  # noqa: F403  every row has a name, and is raised by it
from lt_offload.limits.table import LIMITS as LIMITS
from lt_offload.limits.table import Limit as Limit
from lt_offload.limits.table import Setup as Setup
from lt_offload.limits.table import check as check
