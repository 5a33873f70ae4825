"""Whoever has a slot's bytes at most finds room, whatever came before."""

from __future__ import annotations

import random

import pytest

from offloadzero.memory.arena import Slots

PAGE = 4096


def pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE)


@pytest.mark.parametrize("seed", range(20))
def test_as_many_owners_as_slots_always_find_room(seed: int) -> None:
    """They come and go in any order, their pieces too; every piece has its bytes for itself."""
    draws = random.Random(seed)
    num_slots, slot_pages = draws.randint(1, 5), draws.randint(1, 9)
    slots = Slots(num_slots, slot_pages * PAGE)
    pieces: dict[int, list[tuple[int, int]]] = {}  # (offset, size), by owner
    left: dict[int, int] = {}  # pages that an owner has not asked for, while it is there
    used: set[int] = set()
    for owner in range(200):
        while len(left) == num_slots:
            gone = draws.choice(list(left))
            if not left[gone] or draws.random() < 0.5:
                del left[gone]
                for offset, size in draws.sample(pieces[gone], len(pieces.pop(gone))):
                    slots.give(offset, size)
                    used -= set(range(offset // PAGE, offset // PAGE + pages(size)))
        left[owner] = slot_pages
        pieces[owner] = []
        for asking in draws.choices(list(left), k=3):  # their pieces come in any order
            if left[asking]:
                size = draws.randint(1, left[asking] * PAGE)
                offset = slots.take(asking, size)
                assert offset is not None
                assert offset % PAGE == 0
                own = set(range(offset // PAGE, offset // PAGE + pages(size)))
                assert not own & used
                assert max(own) < num_slots * slot_pages
                used |= own
                left[asking] -= pages(size)
                pieces[asking].append((offset, size))
        assert slots.free_bytes == slots.num_bytes - len(used) * PAGE


def test_one_more_owner_gets_what_others_leave() -> None:
    slots = Slots(2, 3 * PAGE)
    assert [slots.take(0, 2 * PAGE), slots.take(1, PAGE)] == [0, 3 * PAGE]
    assert slots.take(2, 1) is None
    assert slots.largest_bytes == 2 * PAGE
    assert slots.take_anywhere(2 * PAGE) == 4 * PAGE
    assert slots.take_anywhere(2 * PAGE) is None
    assert slots.take_anywhere(1) == 2 * PAGE
    assert (slots.free_bytes, slots.largest_bytes) == (0, 0)


def test_an_owner_with_more_than_a_slot_goes_on_in_another() -> None:
    slots = Slots(2, 2 * PAGE)
    assert [slots.take(7, PAGE), slots.take(7, 2 * PAGE), slots.take(7, PAGE)] == [0, 2 * PAGE, None]
    assert slots.take(8, 3 * PAGE) is None


def test_a_slot_is_free_when_all_in_it_is() -> None:
    """An owner that comes again has no claim on the slot that it had."""
    slots = Slots(1, 2 * PAGE)
    assert [slots.take(0, 1), slots.take(0, 1)] == [0, PAGE]
    slots.give(0, 1)
    assert slots.take(1, 1) is None
    slots.give(PAGE, 1)
    assert slots.take(1, 1) == 0
    assert slots.take(0, 1) is None
