"""Loops over a whole model read and write it in bounded memory, weights and gradients."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest

from tests.support.tiny import run_script

# 48 layers of 4 MiB whose states are in files; a few layers fit on the device.
LOOPS = """
    import json, os, sys, time, traceback
    import torch
    from torch import nn
    import offloadzero

    torch.set_num_threads(1)
    NUM_LAYERS, WIDTH = 48, 768
    UNIT_BYTES = 4 * WIDTH * WIDTH

    def resident_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    class Layer(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 1e-5 * (1 + number)))

        def forward(self, x):
            return x + nn.functional.linear(x, self.weight)

    model = nn.Sequential(*(Layer(number) for number in range(NUM_LAYERS)))
    expected = [1e-5 * (1 + number) for number in range(NUM_LAYERS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    homes = {"device": "nvme", "nvme_path": sys.argv[1]}
    model, optimizer = offloadzero.offload(model, optimizer, {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": homes, "offload_optimizer": homes},
        "offloadzero": {
            "device": "cpu", "placement": [{"grad": "nvme"}], "budgets": {"device": 4 * UNIT_BYTES}},
    })
    report = {"model": NUM_LAYERS * UNIT_BYTES, "unit": UNIT_BYTES}
    peak = 0

    def sample():
        global peak
        peak = max(peak, resident_bytes())

    def values(of):
        found = []
        for p in model.parameters():
            found.append(of(p))
            sample()
        return found

    def check(name, found, wanted, rtol=1e-4):
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(wanted), rtol=rtol, atol=1e-8, msg=lambda text: name + ": " + text)

    def loop(name, body):
        global peak
        optimizer.synchronize()
        before = peak = resident_bytes()
        start = time.perf_counter()
        body()
        report[name] = {"grown": peak - before, "s": time.perf_counter() - start}

    first = lambda p: p[7, 9].item()
    model(torch.ones(1, WIDTH)).sum()  # the leases are there
    optimizer.synchronize()
    for arena in (optimizer.runtime.store.host, optimizer.runtime.store.device):
        arena.buffer[::4096].add_(0)  # what the plan reserves is there from the start
    model.zero_grad()

    {reads}

    {writes}

    {gradients}

    for name, body in (("reads", reads), ("writes", writes), ("gradients", gradients)):
        try:
            loop(name, body)
        except Exception:
            report[name] = traceback.format_exc()
    print(json.dumps(report))
"""

READS = """
    def reads():
        check("norm", values(lambda p: p.detach().norm().item()), [WIDTH * x for x in expected], rtol=5e-3)
        check("data", values(lambda p: p.data[7, 9].item()), expected)
        check("clone", values(lambda p: p.clone().max().item()), expected)
        check("list", [first(p) for p in list(model.parameters())], expected)
"""

WRITES = """
    def writes():
        global expected
        with torch.no_grad():
            values(lambda p: p.mul_(0.5))
        expected = [0.5 * x for x in expected]
        check("mul_", values(first), expected)
        values(lambda p: p.data.mul_(0.5))
        expected = [0.5 * x for x in expected]
        check("data", values(first), expected)
        values(lambda p: nn.init.constant_(p, 0.001))
        expected = [0.001] * NUM_LAYERS
        check("init", values(first), expected)
        expected = [1e-5 * (1 + number) for number in range(NUM_LAYERS)]
        for value, p in zip(expected, model.parameters()):
            p.data = torch.full((WIDTH, WIDTH), value)
            sample()
        check("data =", values(first), expected)
"""

GRADIENTS = """
    def gradients():
        # d loss / d weight is all ones up to what the residual adds: the first layer's is the largest.
        model(torch.full((1, WIDTH), 1e-3)).sum().backward()
        sample()
        before = values(lambda p: p.grad.norm().item())
        assert all(x > 0 for x in before)
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 * sum(x * x for x in before) ** 0.5)
        sample()
        torch.testing.assert_close(float(total), sum(x * x for x in before) ** 0.5, rtol=1e-4, atol=0.0)
        check("clipped", values(lambda p: p.grad.norm().item()), [0.5 * x for x in before])
        mean = values(lambda p: p.grad.double().mean().item())
        values(lambda p: p.grad.add_(torch.ones_like(p.grad), alpha=0.5))
        check("noise", values(lambda p: p.grad.double().mean().item()), [0.5 + x for x in mean])
        with torch.no_grad():  # there and back, as in sharpness-aware minimisation
            values(lambda p: p.add_(p.grad.sign(), alpha=0.25))
            check("perturbed", values(first), [x + 0.25 for x in expected])
            values(lambda p: p.sub_(p.grad.sign(), alpha=0.25))
        values(lambda p: p.grad.sign_())
        check("sign", values(lambda p: p.grad[7, 9].item()), [1.0] * NUM_LAYERS)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.25)
        sample()
        check("value", values(lambda p: p.grad.max().item()), [0.25] * NUM_LAYERS)
        optimizer.step()
        # AdamW's first step is lr against the sign, and the decay.
        wanted = [x * (1 - 1e-3 * 1e-2) - 1e-3 for x in expected]
        check("step", values(first), wanted)
"""


def script() -> str:
    """The loops in one process."""
    made = textwrap.dedent(LOOPS)
    for name, body in (("reads", READS), ("writes", WRITES), ("gradients", GRADIENTS)):
        made = made.replace("{" + name + "}\n", textwrap.dedent(body).strip() + "\n")
    return made


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = run_script(script(), tmp_path_factory.mktemp("files"), timeout_s=100.0)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["reads", "writes", "gradients"])
def test_loops_over_a_model_stay_within_a_few_units(name: str, report: dict[str, Any]) -> None:
    assert isinstance(report[name], dict), report[name]
    assert report[name]["grown"] < report["model"] / 3, report
