"""Capture of work in CUDA graphs: parts of a layer (`GraphPool`), or a whole step (`GraphedStep`)."""

from moe_kernels.graphs.host_reads import host_reads_refused as host_reads_refused
from moe_kernels.graphs.order import Use as Use, buffer_slots as buffer_slots, graph_places as graph_places
from moe_kernels.graphs.pool import GraphPool as GraphPool
from moe_kernels.graphs.step import GraphedStep as GraphedStep
