"""Measurement: bytes that autograd keeps for the backward pass, bytes of live tensors and what they are for, and peak
memory by phase."""

from moe_memory.measure.account import (
    MEMORY_CLASSES as MEMORY_CLASSES,
    UNNAMED as UNNAMED,
    IdleInput as IdleInput,
    MemoryAccount as MemoryAccount,
    MemoryClass as MemoryClass,
    Owner as Owner,
    Peak as Peak,
    open_account as open_account,
    timed as timed,
    within as within,
)
from moe_memory.measure.live import LiveBytes as LiveBytes
from moe_memory.measure.phases import PeakMemory as PeakMemory
from moe_memory.measure.saved import SavedBytes as SavedBytes
