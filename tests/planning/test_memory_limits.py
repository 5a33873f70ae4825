"""Runs in a control group with a memory limit: what the plan says fits is never killed, and what does not is refused.

Each case is a model, a configuration and a limit near what the run takes. Three processes are run in the group: the
plan; the training that it says fits, by itself or after the change that it names; the same with `"placement": "auto"`
and no plan before it. The kernel is the judge: it kills what takes more.

OFFLOADZERO_TEST_LIMITS is the number of cases, none without it (`make campaign`). They are skipped where no control
group can be made.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offloadzero.planning.engine_plan import with_keys
from tests.support.tiny import script_environment, settings

NUM_CASES = int(os.environ.get("OFFLOADZERO_TEST_LIMITS", "0"))
MIB = 1 << 20
SEQUENCE = 64
MICRO_BATCH = 2
# "auto" leaves half of what is free to activations, of which it knows nothing, and to torch, which takes 128 MiB in its
# first step beside the 350 MiB with which a process begins.
AUTO_LIMIT = 700 * MIB
# (where groups are made, the file of the limit, the file that counts kills and its word for them)
VERSIONS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.oom_control"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.events"),
)


class Group:
    """A control group with a memory limit."""

    def __init__(self, path: Path, limit_file: str, kills_file: str) -> None:
        self._path, self._limit_file, self._kills_file = path, limit_file, kills_file

    def limit(self, num_bytes: int) -> None:
        (self._path / self._limit_file).write_text(str(num_bytes))

    def num_killed(self) -> int:
        """The processes that the kernel has killed for memory in this group."""
        (number,) = re.findall(r"^oom_kill (\d+)$", (self._path / self._kills_file).read_text(), re.MULTILINE)
        return int(number)

    def run(self, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a Python script as a process that is in the group before it begins."""
        enter = f'echo $$ > {self._path}/cgroup.procs && exec "$@"'
        return subprocess.run(
            ["sh", "-c", enter, "sh", sys.executable, "-c", script, *map(str, arguments)],
            env=script_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )


@contextmanager
def memory_group() -> Iterator[Group]:
    """A group of this test's own; skips the test where none can be made."""
    reasons = []
    for parent, limit_file, kills_file in VERSIONS:
        try:
            path = Path(tempfile.mkdtemp(prefix="offloadzero-", dir=parent))
        except OSError as error:
            reasons.append(str(error))
            continue
        try:
            if (path / limit_file).exists():
                yield Group(path, limit_file, kills_file)
                return
            reasons.append(f"{parent} has no {limit_file} for its groups")
        finally:
            path.rmdir()
    pytest.skip(f"no control group can be made here: {'; '.join(reasons)}")


PLAN = """
import json, sys
from pathlib import Path
from offloadzero.cli.plan.answer import (Planner, Question)
from offloadzero.planning.model.shapes import (read_model)
from offloadzero.cli.plan.measure import memory_only
from offloadzero.update.spec import UpdateForm

model, sequence, source = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
found = memory_only("cpu", [Path(source["offloadzero"]["nvme_path"])])
planner = Planner(
    Question(
        read_model(model),
        lambda _: found.memory,
        lambda _: UpdateForm.NATIVE,
        sequence=sequence,
        process_bytes=found.process_bytes,
    )
)
change = None
if not planner.verdict(source).fits:
    found_change = planner.smallest_change(source)
    change = [dict(found_change.keys), {tier.value: size for tier, size in found_change.more.items()}]
print(json.dumps(change))
"""

TRAIN = """
import json, sys
import torch
import offloadzero
from offloadzero.planning.model.shapes import (read_model)
from offloadzero.errors import BudgetError

name, sequence, source, is_built_away = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4] == "True"
shape = read_model(name)
torch.manual_seed(0)
try:
    if is_built_away:
        with offloadzero.zero.Init(config_dict_or_path=source):
            model = shape.build()
    else:
        model = shape.build()
    engine, *_ = offloadzero.initialize(model=model, config=source)
except BudgetError as error:
    print("refused:", error)
    sys.exit(0)
micro_batch = source["train_micro_batch_size_per_gpu"]
for _ in range(3 * source.get("gradient_accumulation_steps", 1)):
    ids = torch.randint(shape.shape.vocabulary, (micro_batch, sequence))
    loss = engine(ids)
    engine.backward(loss)
    engine.step()
    assert torch.isfinite(loss)
print("trained", engine.global_steps)
engine.close()
"""


def random_case(seed: int, directory: Path) -> tuple[str, dict[str, Any], bool, int]:
    """A model's shape, a configuration, whether the model is built under zero.Init, and a limit in bytes."""
    draw = random.Random(seed)
    width = draw.choice([384, 512, 640])
    num_blocks, vocabulary = draw.randrange(4, 11), draw.choice([4000, 9000])
    num_parameters = num_blocks * 12 * width**2 + vocabulary * width
    accumulation = draw.choice([1, 1, 2])
    source = settings(
        directory,
        placement=draw.choice(["host", "host", "nvme", "auto", {"param": "host", "states": "nvme"}]),
        state_layout=draw.choice(["fp32", "compact"]),
        train_micro_batch_size_per_gpu=MICRO_BATCH,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=draw.choice([0.0, 1.0]),
    )
    limit = 350 * MIB + int(num_parameters * draw.uniform(2, 18))
    return f"gpt:{width}/{num_blocks}/{width // 64}/{vocabulary}", source, draw.random() < 0.5, limit


def expect_trained(group: Group, model: str, source: Mapping[str, Any], is_built_away: bool) -> None:
    done = group.run(TRAIN, model, SEQUENCE, json.dumps(source), is_built_away)
    assert done.returncode == 0, (group.num_killed(), done.stderr)
    assert done.stdout.startswith("trained 3"), done.stdout


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_what_the_plan_allows_is_not_killed(seed: int, tmp_path: Path) -> None:
    model, source, is_built_away, limit = random_case(seed, tmp_path)
    with memory_group() as group:
        group.limit(limit)
        planned = group.run(PLAN, model, SEQUENCE, json.dumps(source))
        assert planned.returncode == 0, planned.stderr
        change = json.loads(planned.stdout)
        print(f"{model}, {limit >> 20} MiB, {source['offloadzero']['placement']}: {change or 'fits'}")
        if change is not None:
            keys, more = change
            source = with_keys(source, keys)
            group.limit(limit + more.get("host", 0) + more.get("device", 0))
        expect_trained(group, model, source, is_built_away)


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_auto_without_a_plan_is_trained_or_refused(seed: int, tmp_path: Path) -> None:
    model, source, is_built_away, limit = random_case(seed, tmp_path)
    source, limit = with_keys(source, {"offloadzero.placement": "auto"}), max(limit, AUTO_LIMIT)
    with memory_group() as group:
        group.limit(limit)
        done = group.run(TRAIN, model, SEQUENCE, json.dumps(source), is_built_away)
        assert done.returncode == 0, (group.num_killed(), done.stderr)
        assert done.stdout.startswith(("trained 3", "refused")), done.stdout
        print(f"{model}, {limit >> 20} MiB: {done.stdout[:60]!r}")
