"""The conformance kits of data-parallel engines. They need no test framework; pytest collects a subclass as it is."""

from moe_memory.testing.conformance import DataParallelConformance as DataParallelConformance
from moe_memory.testing.ranks import RanksConformance as RanksConformance
