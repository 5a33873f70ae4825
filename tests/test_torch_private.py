"""torch's private names: all in one module, which names the versions; an older torch is refused at import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offloadzero import torch_private

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "offloadzero"


def looked_up_names() -> list[str]:
    """The dotted names of functions in the module's own source; a class cannot be taken from torch once loaded."""
    return re.findall(r'"(_C\.[\w.]*_[a-z_]+)"', (PACKAGE / "torch_private.py").read_text())


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("name", looked_up_names())
def test_a_torch_without_the_name_is_refused_at_import(name: str) -> None:
    holder, _, attribute = f"torch.{name}".rpartition(".")
    lacking = f"import torch; delattr({holder}, {attribute!r}); torch.__version__ = '2.7.1'; "
    done = run_python(lacking + "import offloadzero.torch_private")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: offloadzero needs torch >= 2.8 (tested with 2.8, 2.11, 2.13): torch 2."
    )
    assert last.endswith(f"has no torch.{name}")


def test_importing_the_package_does_not_look_them_up() -> None:
    done = run_python("import offloadzero, sys; print('offloadzero.torch_private' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_the_names_do_what_the_comments_say() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert torch_private.top_saved_tensors_default_hooks(False) is None
    torch_private.push_saved_tensors_default_hooks(pack, pack)
    try:
        assert torch_private.top_saved_tensors_default_hooks(False) == (pack, pack)
    finally:
        torch_private.pop_saved_tensors_default_hooks()
    assert torch_private.top_saved_tensors_default_hooks(False) is None
    assert torch_private.current_autograd_node() is None
    assert torch_private.current_graph_task_id() == -1
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    product = leaf * 2
    product.register_hook(
        lambda _: seen.append((torch_private.current_autograd_node(), torch_private.current_graph_task_id()))
    )
    product.sum().backward()
    ((node, task),) = seen
    assert node is not None
    assert task >= 0
