"""Arenas, and the leases that are cut from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offloadzero.errors import BudgetError, StateError
from offloadzero.memory.arena import Arena, allocate_host

PAGE = 4096


def arena(num_pages: int, *, poison: bool = False) -> Arena:
    return Arena("test", allocate_host(num_pages * PAGE), poison=poison)


def test_host_memory_is_exact_aligned_and_zero() -> None:
    buffer = allocate_host(5 * PAGE + 4096)
    assert buffer.numel() == 6 * PAGE
    assert buffer.data_ptr() % PAGE == 0
    assert not buffer.any()
    assert allocate_host(0).numel() == 0


def test_leases_are_aligned_and_rounded_up() -> None:
    space = arena(4)
    lease = space.lease(1, "a")
    assert (lease.num_bytes, lease.offset % PAGE, space.free_bytes) == (PAGE, 0, 3 * PAGE)
    assert lease.bytes.data_ptr() % PAGE == 0
    assert space.lease(PAGE + 1, "b").num_bytes == 2 * PAGE


def test_the_best_fitting_hole_is_taken() -> None:
    space = arena(12)
    leases = [space.lease(pages * PAGE, str(pages)) for pages in (4, 1, 2, 1, 3, 1)]
    for index in (0, 2, 4):  # holes of 4, 2 and 3 pages
        leases[index].release()
    assert space.lease(2 * PAGE, "x").offset == 5 * PAGE
    assert space.lease(3 * PAGE, "y").offset == 8 * PAGE
    assert space.lease(1 * PAGE, "z").offset == 0


def test_neighbouring_holes_become_one() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2]):
        space = arena(3)
        leases = [space.lease(PAGE, str(i)) for i in range(3)]
        for index in order:
            leases[index].release()
        assert space.lease(3 * PAGE, "whole").offset == 0


def test_double_release_and_no_room() -> None:
    space = arena(2)
    lease = space.lease(PAGE, "blocks.7")
    lease.release()
    with pytest.raises(StateError, match=r"blocks\.7"):
        lease.release()
    assert space.free_bytes == 2 * PAGE
    assert space.try_lease(3 * PAGE, "large") is None
    with pytest.raises(BudgetError, match=r"large.*12,288.*test.*8,192"):
        space.lease(3 * PAGE, "large")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_poison_turns_a_released_lease_into_nan(dtype: torch.dtype) -> None:
    space = arena(2, poison=True)
    lease, other = space.lease(PAGE, "a"), space.lease(PAGE, "b")
    view = lease.view(dtype, PAGE // dtype.itemsize)
    view.fill_(1)
    other.bytes.fill_(7)
    lease.release()
    assert bool(view.isnan().all())
    assert bool((other.bytes == 7).all())


def test_a_view_stays_inside_its_lease() -> None:
    lease = arena(2).lease(PAGE, "a")
    assert lease.view(torch.float32, 10, start_byte=64).data_ptr() == lease.bytes.data_ptr() + 64
    with pytest.raises(AssertionError):
        lease.view(torch.float32, PAGE // 4 + 1)


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 5 * PAGE), st.integers(0, 10), st.booleans()), max_size=40
    )
)
@settings(max_examples=150, deadline=None)
def test_leases_never_overlap_and_nothing_is_lost(operations: list[tuple[bool, int, int, bool]]) -> None:
    space = arena(16)
    owner = [None] * 16
    held = {}
    for number, (taking, size, pick, from_end) in enumerate(operations):
        if taking:
            lease = space.try_lease(size, str(number), from_end=from_end)
            pages = -(-size // PAGE)
            free_runs = "".join("x" if page is not None else "." for page in owner)
            assert (lease is None) == ("." * pages not in free_runs)
            if lease is not None:
                first = lease.offset // PAGE
                if from_end:
                    assert "." * pages not in free_runs[first + 1 :]
                assert owner[first : first + pages] == [None] * pages
                owner[first : first + pages] = [number] * pages
                held[number] = lease
        elif held:
            number = sorted(held)[pick % len(held)]
            held.pop(number).release()
            owner = [None if page == number else page for page in owner]
        assert space.free_bytes == owner.count(None) * PAGE
