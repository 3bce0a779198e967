"""The contract between profiling, planning and execution: frozen data, JSON both ways, no torch."""
