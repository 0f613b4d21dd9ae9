"""`Zero1`: flat buckets, with master weights and moments sharded over the replicas (ZeRO-1, arXiv 1910.02054).

Parameters that behave alike (`BucketKey`) lie in one bucket, so that a norm, a reduction and, of float32 state, an
update is one operation on one tensor. The reduction of a bucket runs under the rest of the backward, its weights come
back under the next forward.
"""

from collections.abc import Mapping

from torch import nn

from moe_memory.data_parallel.bucket import Bucket, BucketKey
from moe_memory.data_parallel.sharded import ShardedEngine


class Zero1(ShardedEngine):
    """The default data-parallel engine; arguments and errors are those of `ShardedEngine`.

    Every rank computes with whole weights. Reductions are issued in the order in which buckets are complete. It must be
    the same on all ranks, and is where all run the same schedule of layers.
    """

    def _build_stores(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], keys: Mapping[str, BucketKey]
    ) -> list[Bucket]:
        self._buckets = self._build_buckets(parameters, keys)
        places = {name: place for place, name in enumerate(parameters)}
        self._buckets.sort(key=lambda bucket: places[bucket.names[0]])
        return self._buckets
