"""The collectives of one step of one of several ranks, by purpose and kind, as a rank counts those that it issues.

[Note: which collectives a step has]
A fetch of a unit whose parameters are divided gathers its regions, the trainable elements and the frozen ones: over all
ranks, or, with ZeRO++'s copies for near ranks, over those of a machine, but for the first time after an update. A
gradient is reduced once in each backward: whole, in pieces of another dtype, or as codes, within a machine and then
between machines. Parameters that stay whole on each device are gathered once, after their update. Before each gather
over all ranks, and before each one from near copies, the ranks compare their orders.

Bytes are those of [Note: bytes of a collective] in observe/collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from offloadzero.config import OffloadConfig
from offloadzero.observe.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, comparison
from offloadzero.planning.memory_plan import MemoryPlan
from offloadzero.update.records import Record
from offloadzero.update.spec import DTYPES
from offloadzero.update.wire import gradient_wire, wire_regions

WEIGHTS, NEAR_WEIGHTS, UPDATES, ORDERS = "weights", "near_weights", "updates", "orders"
GRADIENTS, NEAR_GRADIENTS, FAR_GRADIENTS = "gradients", "near_gradients", "far_gradients"
# Their bytes are those of parameters and gradients; others are some bytes in host memory.
OF_TENSORS = (WEIGHTS, NEAR_WEIGHTS, UPDATES, GRADIENTS, NEAR_GRADIENTS, FAR_GRADIENTS)

Collective = tuple[str, str, int]  # purpose, kind, bytes


def of_fetch(record: Record, config: OffloadConfig, *, is_near: bool) -> Iterator[Collective]:
    """Yield the collectives of a fetch of a divided record. `is_near`: from the copies that near ranks keep."""
    yield ORDERS, *comparison(record.shard.world_size, num_values=2)
    coded = {} if is_near else wire_regions(record, config.zero_plus_plus)
    for start, stop in ((0, record.num_trainable), (record.num_trainable, record.num_elements)):
        if start == stop:
            continue
        if start in coded:
            region = coded[start]
            yield WEIGHTS, ALL_GATHER, region.num_elements  # a byte each
            yield WEIGHTS, ALL_GATHER, region.shard.world_size * region.beside_bytes
        else:
            purpose = NEAR_WEIGHTS if is_near else WEIGHTS
            yield purpose, ALL_GATHER, (stop - start) * record.dtype.itemsize


def of_gradient(
    record: Record, plan: MemoryPlan, config: OffloadConfig, *, machine_ranks: int
) -> Iterator[Collective]:
    """Yield the collectives of the gradient of one backward. `machine_ranks`: [Note: two hops]'s G."""
    wire, num_ranks = gradient_wire(record, config.zero_plus_plus), record.shard.world_size
    if wire is not None:
        if wire.region.exact:
            num_exact = wire.region.exact_elements * num_ranks
            yield GRADIENTS, REDUCE_SCATTER, num_exact * record.dtype.itemsize
        num_machines = num_ranks // machine_ranks
        if machine_ranks > 1:
            yield NEAR_GRADIENTS, ALL_TO_ALL, num_ranks * wire.packet_bytes
        if num_machines > 1:
            yield FAR_GRADIENTS, ALL_TO_ALL, num_machines * wire.packet_bytes
        return
    kind = REDUCE_SCATTER if num_ranks > 1 else ALL_REDUCE
    sent_as = DTYPES[config.communication_dtype]
    if sent_as is None or sent_as == record.dtype:
        yield GRADIENTS, kind, record.num_trainable * record.dtype.itemsize
        return
    kept = record.num_trainable // num_ranks
    most = plan.gradient_piece_bytes // sent_as.itemsize // num_ranks  # of each rank's part
    for start in range(0, kept, most):
        yield GRADIENTS, kind, min(most, kept - start) * num_ranks * sent_as.itemsize


def of_update(record: Record) -> Iterator[Collective]:
    """Yield the collective of the new parameters of a record that stays whole on each device."""
    if record.state.keeps_whole_params:
        yield UPDATES, ALL_GATHER, record.num_trainable * record.dtype.itemsize
