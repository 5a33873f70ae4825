"""The order in which a backward's gradients leave the device: as they are complete, or one on which ranks agree.

[Note: when a gradient is reduced]
A unit's gradient may be reduced as soon as it is complete, and the ranks must do so in one order. So units are expected
in a certain order, and a complete gradient waits for those before it. A unit that some rank completes only at the end
of a backward (an expert that got no token there) would hold up all others. So at the end of each backward the ranks say
which units they had complete before, and a unit that was not is no longer expected. The units that are left then follow
in the records' order, if some rank has a gradient of them.

The first backward expects the reversed order in which the first rank's forward used the records, and then those that it
did not use; later ones expect the order that the first rank saw in it. The order of the records themselves would not
do: of a model whose embedding is made after its blocks all other gradients would wait for that of the embedding, the
last one, in memory that nothing plans.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from offloadzero.errors import StateError
from offloadzero.ranks.group import Group
from offloadzero.step.record_gradient import WindowGradients
from offloadzero.streaming.executor import Executor
from offloadzero.update.records import Record


class ReduceOrder:
    """Says which gradients of a backward are reduced next: [Note: when a gradient is reduced]."""

    def __init__(self, records: Iterable[int]) -> None:
        self._records = tuple(records)
        self._expected = self._records[::-1]
        self._next = 0  # index into the expected ones: those before it have gone
        self._complete: dict[int, None] = {}  # in the order of their completion

    @property
    def completed(self) -> Sequence[int]:
        """The records that were complete before the end of this backward, in their order."""
        return tuple(self._complete)

    def begin(self) -> None:
        """Begin a backward."""
        self._next = 0
        self._complete.clear()

    def complete(self, record: int, name: str) -> list[int]:
        """Note that a record's gradient is complete; return the records that are reduced now.

        Raises StateError where it is complete already in this backward.
        """
        if record in self._complete:
            raise StateError(
                f"{name} gets its gradients a second time in one backward (a reentrant checkpoint around a shared "
                "module?), which is not supported over several ranks: set use_reentrant=False"
            )
        self._complete[record] = None
        now = []
        while self._next < len(self._expected) and self._expected[self._next] in self._complete:
            now.append(self._expected[self._next])
            self._next += 1
        return now

    def rest(self, present: Collection[int]) -> list[int]:
        """Return the records to reduce at the end of the backward; `present`: some rank has a gradient of them."""
        late = [record for record in self._expected[self._next :] if record in present]
        return [
            *late,
            *(record for record in self._records if record in present and record not in self._expected),
        ]

    def learn(self, order: Sequence[int]) -> None:
        """Expect the records of `order` from now on."""
        self._expected = tuple(order)

    def expect_only(self, everywhere: Collection[int]) -> None:
        """Expect only the records that all ranks had complete before the end."""
        self._expected = tuple(record for record in self._expected if record in everywhere)


class GradientOrder:
    """Says which gradients leave next. One rank waits for none; several: [Note: when a gradient is reduced]."""

    def __init__(self, group: Group, gradients: WindowGradients, executor: Executor) -> None:
        self._control = group.control
        self._gradients = gradients
        self._executor = executor
        self._order = ReduceOrder(gradients)
        self._is_alone = group.is_alone
        self._has_begun = self._has_learnt = False
        if self._is_alone:
            return
        expect_first_order = weakref.WeakMethod(self._expect_first_order)

        def before_backward() -> None:
            if (call := expect_first_order()) is not None:
                call()

        executor.call_before_backward(before_backward)

    def begin_backward(self) -> None:
        """Begin a backward."""
        if not self._is_alone:
            self._expect_first_order()
            self._order.begin()

    def complete(self, record: Record) -> Sequence[int]:
        """Note that a record's gradient is complete; return the records whose gradients leave now."""
        return (record.index,) if self._is_alone else self._order.complete(record.index, record.name)

    def end_backward(self, *, closes_window: bool) -> Mapping[int, frozenset[int]]:
        """Return the records whose gradients are left, in their order, and the slots of which some rank has one."""
        if self._is_alone:
            left = {index: frozenset(gradient.arrived) for index, gradient in self._gradients.items()}
            return {index: places for index, places in left.items() if places}
        present, everywhere = self._agree_on_present(closes_window=closes_window)
        rest = self._order.rest([index for index, places in present.items() if places])
        self._learn_order(everywhere)
        return {index: present[index] for index in rest}

    # --- over several ranks ---

    def _expect_first_order(self) -> None:
        """Expect them in the reversed order of the first rank's forward: [Note: when a gradient is reduced].

        The ranks come here in the first backward: with their first gradient, or before they fetch anything. The first
        gradient of one, an expert's say, may come before a fetch for which it would wait here, and another's after it.
        """
        if self._has_begun:
            return
        self._has_begun = True
        self._executor.call_before_backward(None)
        used = dict.fromkeys(index for index in self._executor.take_entered() if index in self._gradients)
        # What may never come is last, so nothing waits for it.
        unused = (index for index in reversed(self._gradients) if index not in used)
        order = torch.tensor([*reversed(used), *unused], dtype=torch.int64, device="cpu")
        if self._control.spec.rank:
            order.fill_(-1)
        # The first rank's order, by a collective that ends with all ranks: [Note: deadlocks].
        self._control.all_reduce(order, "the order of the first gradients", largest=True)
        self._order.learn(order.tolist())

    def _agree_on_present(self, *, closes_window: bool) -> tuple[dict[int, frozenset[int]], list[int]]:
        """Return the slots with a gradient on some rank, by record, and the records complete on all ranks before."""
        gradients = self._gradients
        counts = [len(gradient.sq_norms) for gradient in gradients.values()]
        flags = torch.zeros(sum(counts) + len(counts) + 2, dtype=torch.uint8, device="cpu")
        *slots, late, closing = flags.split([*counts, len(counts), 2])
        completed = self._order.completed
        for number, (gradient, own) in enumerate(zip(gradients.values(), slots, strict=True)):
            index = gradient.record.index
            late[number] = index not in completed
            if index in completed:
                own.fill_(1)
            elif gradient.arrived:
                own[torch.tensor(list(gradient.arrived), device="cpu")] = 1
        closing[int(closes_window)] = 1
        self._control.all_reduce(flags, "the end of a backward", largest=True)
        if bool(closing.all()):
            raise StateError(
                "this micro batch is the last of its step on some ranks and not on others: all ranks must take the "
                "same number of micro batches per step, and set the same accumulation boundaries"
            )
        present = {
            index: frozenset(own.nonzero().view(-1).tolist())
            for index, own in zip(gradients, slots, strict=True)
        }
        return present, [
            index for index, is_late in zip(gradients, late.tolist(), strict=True) if not is_late
        ]

    def _learn_order(self, everywhere: Sequence[int]) -> None:
        if self._has_learnt:
            self._order.expect_only(everywhere)
            return
        completed = [index for index in self._order.completed if index in everywhere]
        order = torch.tensor(completed, dtype=torch.int64, device="cpu")
        self._control.broadcast(order, "the order of gradients")
        self._order.learn(order.tolist())
        self._has_learnt = True
