"""What the dispatchers of a step sent: the numbers behind the metrics `comm/...`."""

from dataclasses import astuple

import torch

from moe_comm import TrafficLedger
from moe_parallel import Groups, LinkClass, Topology, all_reduce
from moe_train.observe.record import StepTraffic

# Of the fields of `StepTraffic` so many are added up over the ranks; of the others the largest counts.
_ADDED_UP = 4


def traffic_here(ledger: TrafficLedger, topology: Topology) -> StepTraffic:
    """What this rank did."""
    sent = ledger.bytes_by_link(topology)
    return StepTraffic(
        network_bytes=sent[LinkClass.NETWORK],
        node_bytes=sent[LinkClass.NODE] + sent[LinkClass.NVLINK],
        self_bytes=sent[LinkClass.SELF],
        metadata_bytes=ledger.leaving_bytes("metadata"),
        collectives=ledger.collectives(),
        host_syncs=ledger.host_syncs,
        peak_buffer_bytes=ledger.peak_buffer_bytes,
    )


def traffic_of_all(here: StepTraffic, groups: Groups) -> StepTraffic:
    """What all ranks did, from what each did; collective. The numbers stay on the host: no device is waited for."""
    group = groups.group("world")
    if group is None:
        return here
    numbers = torch.tensor(astuple(here))
    pending = all_reduce(numbers[:_ADDED_UP].clone(), group), all_reduce(numbers[_ADDED_UP:].clone(), group, op="max")
    return StepTraffic.from_numbers([number for part in pending for number in part.wait().tolist()])
