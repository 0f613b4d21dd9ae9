"""The copy engine that stands in for streams: late, strict, and in order of what it is asked for."""

import pytest
import torch

from moe_memory import MoeMemoryError
from moe_memory.copies import FakeCopies, copies_of


def test_a_machine_without_a_device_has_the_one_that_stands_in():
    assert isinstance(copies_of(torch.device("cpu")), FakeCopies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_r081_a_target_is_spoiled_until_somebody_waits(dtype):
    copies = FakeCopies()
    source = torch.randint(1, 9, (5,)).to(dtype)
    out = copies.host_empty(source)
    pending = copies.to_host(source, out)
    assert not pending.done()
    assert not bool((out == source).any())
    assert torch.equal(pending.wait(), source)
    assert copies.in_flight == 0
    back = torch.zeros_like(source)
    other = copies.to_device(out, back)
    assert not bool((back == source).any())
    assert torch.equal(other.wait(), source)


def test_a_source_that_is_written_too_early_is_seen():
    copies = FakeCopies()
    source = torch.ones(3)
    pending = copies.to_host(source)
    source.zero_()
    assert not torch.equal(pending.wait(), torch.ones(3))


def test_races_are_refused():
    copies = FakeCopies()
    source, out = torch.ones(3), torch.empty(3)
    copies.to_host(source, out)
    with pytest.raises(MoeMemoryError, match="reads what another has not written"):
        copies.to_device(out, torch.empty(3))
    with pytest.raises(MoeMemoryError, match="writes what another has not finished with"):
        copies.to_host(torch.ones(3), out)
    with pytest.raises(MoeMemoryError, match="writes what another has not finished with"):
        copies.to_device(torch.ones(3), source)


def test_memory_is_released_when_the_last_copy_of_it_is_made():
    copies = FakeCopies()
    source = torch.ones(3)
    pending = [copies.to_host(source), copies.to_host(source)]
    copies.release(source)
    pending[0].wait()
    assert source.untyped_storage().nbytes() == 12
    with pytest.raises(MoeMemoryError, match="still being copied away"):
        copies.restore(source)
    assert torch.equal(pending[1].wait(), torch.ones(3))
    assert source.untyped_storage().nbytes() == 0
    copies.restore(source)
    assert source.fill_(2.0).tolist() == [2.0, 2.0, 2.0]
    copies.release(source)
    assert source.untyped_storage().nbytes() == 0
