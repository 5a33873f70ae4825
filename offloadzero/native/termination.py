"""Files that are removed when SIGTERM or SIGHUP ends the process.

As long as there is such a file, the default action of these signals is replaced by one that removes the files and then
lets the signal end the process all the same: at once, whatever the process waits for. A handler of the user's own stays
in force, whether it was there before or comes later; then the file goes when the process ends in order, or at the next
start.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from offloadzero.native import _termination


class DoomedFile:
    """A file that these signals remove, until `spare()` or the end of this object."""

    def __init__(self, path: Path) -> None:
        place = _termination.add(os.fsencode(path.absolute()))
        self._spare = weakref.finalize(self, _termination.discard, place)
        self._spare.atexit = False  # the file may still be there when the interpreter goes

    def spare(self) -> None:
        """Remove the file from the list: it is gone already, or it is to stay."""
        self._spare()


def is_installed() -> bool:
    """Whether SIGTERM would remove files of this process now."""
    return _termination.is_installed()
