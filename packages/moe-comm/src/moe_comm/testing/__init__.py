"""The conformance kit of dispatchers. It needs no test framework; pytest collects a subclass as it is."""

from moe_comm.testing.conformance import DispatcherConformance as DispatcherConformance
