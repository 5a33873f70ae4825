"""Each shape that a plan is made of is traced once in a process."""

from __future__ import annotations

from tests.support.traces import shapes_traced_once  # noqa: F401 -- a fixture
