"""Imports go downwards: no file of the package imports from a floor above its own, and there is no circle.

Function-level and TYPE_CHECKING imports count, and so does importlib.import_module with a literal name.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "offloadzero"

# First component below the package -> floor. "" is the package's own __init__.py.
FLOORS: Mapping[str, int] = {
    "": 7,
    "cli": 7,
    "__main__": 7,
    "integrations": 7,
    "ops": 7,
    "api": 6,
    "zero": 6,
    "engine": 6,
    "checkpoint": 5,
    "step": 5,
    "streaming": 5,
    "activations": 5,
    "access": 4,
    "optim": 4,
    "update": 4,
    "planning": 4,
    "schedule": 3,
    "memory": 3,
    "ranks": 3,
    "arithmetic": 3,
    "native": 2,
    "io": 2,
    "config": 1,
    "observe": 1,
    "core": 0,
    "errors": 0,
}

# Built from csrc/: no Python file shows them.
COMPILED = ("io._aio", "native._kernels", "native._termination")

# What `import offloadzero` must not load: optional dependencies, the async file fallback, compiled modules.
FORBIDDEN_AT_IMPORT = (
    "transformers",
    "accelerate",
    "lightning",
    "deepspeed",
    "aiofiles",
    "triton",
    "offloadzero.io._aio",
    "offloadzero.native._kernels",
    "offloadzero.native._termination",
)

Graph = dict[str, set[str]]


def test_every_name_on_a_floor_is_there() -> None:
    names = {name for name in FLOORS if name}
    assert names == {
        name for name in names if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()
    }


def module_files(package: Path) -> dict[str, Path]:
    """Dotted module name -> file."""
    modules = {}
    for file in sorted(package.rglob("*.py")):
        parts = [package.name, *file.relative_to(package).with_suffix("").parts]
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return modules


def imported_names(module: str, file: Path) -> Iterable[tuple[int, str]]:
    """(line, dotted name) of every import; `from a import b` gives a.b, which may be a module or a name."""
    anchor = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = anchor.split(".")[: len(anchor.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def resolve(name: str, modules: Iterable[str]) -> str:
    """The longest prefix of `name` that is a module: a name taken from a package counts as its __init__."""
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


def group_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@functools.cache
def import_graph(package: Path) -> tuple[Graph, dict[tuple[str, str], int]]:
    """Edges between the package's modules, and the line of each."""
    modules = module_files(package)
    graph: Graph = {module: set() for module in modules}
    known = {*modules, *(f"{package.name}.{name}" for name in COMPILED)}
    lines: dict[tuple[str, str], int] = {}
    for module, file in modules.items():
        for line, name in imported_names(module, file):
            if name.split(".")[0] != package.name:
                continue
            target = resolve(name, known)
            # An unwritten package still stands on its floor.
            if target == package.name and name != package.name and name.split(".")[1] in FLOORS:
                target = ".".join(name.split(".")[:2])
            if target != module:
                graph[module].add(target)
                lines.setdefault((module, target), line)
    return graph, lines


def find_circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """One circle as a path whose last node is its first; empty when there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph.get(node, ())):
            circle = visit(target, [*path, node])
            if circle:
                return circle
        done.add(node)
        return []

    for start in sorted(graph):
        circle = visit(start, [])
        if circle:
            return circle
    return []


def violations(package: Path) -> list[str]:
    """Everything wrong with a package tree's imports, one line each; empty when it is clean."""
    graph, lines = import_graph(package)
    problems = [
        f"{module}: {group_of(module)!r} is on no known floor"
        for module in graph
        if group_of(module) not in FLOORS
    ]
    if problems:
        return problems
    groups: Graph = {}
    for module, targets in graph.items():
        own = group_of(module)
        for target in sorted(targets):
            other = group_of(target)
            if other == own:
                continue
            groups.setdefault(own, set()).add(other)
            if FLOORS[other] > FLOORS[own]:
                where = f"{module}:{lines[module, target]}"
                problems.append(f"{where} (floor {FLOORS[own]}) imports {target} (floor {FLOORS[other]})")
    for kind, edges in (("modules", graph), ("packages", groups)):
        circle = find_circle(edges)
        if circle:
            problems.append(f"circle of {kind}: {' -> '.join(circle)}")
    return problems


def test_imports_go_downwards() -> None:
    assert violations(PACKAGE) == []


def test_the_graph_is_not_empty() -> None:
    graph, _ = import_graph(PACKAGE)
    assert "offloadzero.errors" in graph["offloadzero.config.readers"]
    assert graph["offloadzero.errors"] == set()


def plant(tmp_path: Path, files: Mapping[str, str]) -> Path:
    package = tmp_path / "offloadzero"
    for name, text in files.items():
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text)
    (package / "__init__.py").touch()
    return package


CLEAN = {
    "errors.py": "import os\n",
    "config/load.py": "from offloadzero.errors import X\nfrom . import schema\n",
    "config/schema.py": "from ..errors import X\n",
    "engine.py": "from offloadzero.config import load\nimport offloadzero.io._aio\n",
    "io/engine.py": "from offloadzero.io import _aio\nfrom ..errors import X\n",
}


@pytest.mark.parametrize(
    "text",
    [
        "import offloadzero.api.engine\n",
        "from offloadzero import engine\n",
        "from .. import engine\n",
        "import offloadzero\n",
        "import offloadzero.memory.store\n",  # not written in this tree
        "def late() -> None:\n    from offloadzero.api.engine import initialize\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from offloadzero.api.engine import Engine\n",
        "import importlib\nimportlib.import_module('offloadzero.api.engine')\n",
    ],
)
def test_the_checker_catches_an_upward_import(tmp_path: Path, text: str) -> None:
    found = violations(plant(tmp_path, {**CLEAN, "config/schema.py": text}))
    line = 1 + text[: text.rindex("offloadzero") if "offloadzero" in text else 0].count("\n")
    assert any(problem.startswith(f"offloadzero.config.schema:{line} (floor 1)") for problem in found), found


def test_the_checker_catches_circles(tmp_path: Path) -> None:
    inside = {
        **CLEAN,
        "config/schema.py": "def late():\n    from offloadzero.config.load import load_config\n",
    }
    assert violations(plant(tmp_path / "inside", inside)) == [
        "circle of modules: offloadzero.config.load -> offloadzero.config.schema -> offloadzero.config.load"
    ]
    siblings = {
        "memory/a.py": "import offloadzero.ranks.b\n",
        "memory/c.py": "",
        "ranks/b.py": "",
        "ranks/d.py": "import offloadzero.memory.c\n",
    }
    assert violations(plant(tmp_path / "siblings", siblings)) == [
        "circle of packages: memory -> ranks -> memory"
    ]


def test_the_checker_wants_a_floor_for_every_file(tmp_path: Path) -> None:
    found = violations(plant(tmp_path, {**CLEAN, "utils/misc.py": ""}))
    assert found == [
        "offloadzero.utils: 'utils' is on no known floor",
        "offloadzero.utils.misc: 'utils' is on no known floor",
    ]


# What torch has for what runs on a device: offloadzero/memory/device.py alone asks it.
THE_DEVICES_FILE = "memory/device.py"
OF_DEVICES = ("accelerator", "cuda", "get_device_module", "Event", "mps", "mtia", "npu", "Stream", "xpu")
NAMED_ELSEWHERE = {
    (
        "update/adam_form.py",
        "get_device_module",
    ): "Triton launches on the current device; a device guard of any kind",
    (
        "core/launch.py",
        "accelerator",
    ): "whether there is one, before an engine has a device: nothing is launched",
}


def names_of_devices(text: str) -> set[str]:
    """Which of OF_DEVICES a file takes from torch, by an attribute or an import."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "torch" else set()
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("torch.")}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            first, _, rest = node.module.partition(".")
            if first == "torch":
                found |= {rest.split(".")[0]} if rest else {alias.name for alias in node.names}
    return found & set(OF_DEVICES)


def test_one_file_names_torch_cuda() -> None:
    """In words, too: what is said of it elsewhere is said of the device."""
    files = [path for path in PACKAGE.rglob("*.py") if "torch.cuda" in path.read_text()]
    assert [str(path.relative_to(PACKAGE)) for path in files] == [THE_DEVICES_FILE]


def test_one_file_asks_torch_for_what_runs_on_a_device() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        for name in names_of_devices(path.read_text())
    }
    elsewhere = {(file, name) for file, name in found if file != THE_DEVICES_FILE}
    assert elsewhere == set(NAMED_ELSEWHERE)
    assert {name for file, name in found if file == THE_DEVICES_FILE} >= {
        "cuda",
        "accelerator",
        "Stream",
        "Event",
    }


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch\ntorch.cuda.synchronize()\n", "cuda"),
        ("from torch import cuda as device\n", "cuda"),
        ("from torch.cuda import Stream as Queue\n", "cuda"),
        ("def late():\n    from torch.accelerator import synchronize\n", "accelerator"),
    ],
)
def test_what_runs_on_a_device_is_seen(text: str, name: str) -> None:
    assert names_of_devices(text) == {name}


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LOADED = "import sys; names = {names!r}; print([n for n in names if n in sys.modules])"


def test_importing_the_package_loads_nothing_optional() -> None:
    report = LOADED.format(names=FORBIDDEN_AT_IMPORT)
    assert run_python(f"import offloadzero; {report}") == "[]"
    # The report does see what is there.
    assert run_python(f"import aiofiles; {report}") == "['aiofiles']"


def test_importing_the_package_leaves_cuda_alone() -> None:
    code = "import offloadzero, sys; t = sys.modules.get('torch'); print(bool(t and t.cuda.is_initialized()))"
    assert run_python(code) == "False"


def test_the_configuration_loads_without_torch() -> None:
    code = "import offloadzero.config as c; c.load_config({'bf16': {'enabled': True}}); "
    parents = run_python("import offloadzero, sys; print('torch' in sys.modules)")
    if parents == "True":
        pytest.skip("the package's own __init__ loads torch already")
    assert run_python(code + LOADED.format(names=("torch", "numpy"))) == "[]"


def test_training_does_not_load_the_compiler() -> None:
    """torch's decorator of Optimizer.add_param_group would: 70 MiB and a second and a half."""
    code = """
import sys, torch, offloadzero
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
}
engine, optimizer, *_ = offloadzero.initialize(model=torch.nn.Linear(8, 8), config=config)
before = engine.module.weight.detach().clone()
engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
engine.step()
optimizer.zero_grad()
assert len(optimizer.param_groups) == 1 and not torch.equal(before, engine.module.weight.detach())
engine.close()
print("torch._dynamo" in sys.modules)
"""
    assert run_python(code) == "False"
