"""Programs that compare ways of training without training: by the simulator."""
