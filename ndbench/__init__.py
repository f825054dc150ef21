"""ndbench: benchmarking and regression testing for N-dimensional parallel training."""

__version__ = "0.1.0"
