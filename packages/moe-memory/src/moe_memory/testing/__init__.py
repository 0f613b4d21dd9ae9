"""The conformance kit of data-parallel engines. It needs no test framework; pytest collects a subclass as it is."""

from moe_memory.testing.conformance import DataParallelConformance as DataParallelConformance
