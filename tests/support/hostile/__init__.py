"""An emulated device that shows what the engine does wrong: see :mod:`tests.support.hostile.device`."""
