"""docs/fine-tuning.md: its scripts run at a tiny size, and its figures are those of the plan."""

from __future__ import annotations

import difflib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import offloadzero
from offloadzero.cli.main import main
from tests.scripts.common import forget_accelerate
from tests.support.ranks import run_torchrun

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "fine-tuning.md").read_text()
README = (ROOT / "README.md").read_text()
RATES = re.compile(r"learning_rate=1e-\d")
RATE = "learning_rate=1e-2"  # a few steps with it show; the page's are for many
PROCESS_BYTES = 364 << 20  # of Python and torch, as a new process has them
OUTPUT = 'output_dir="checkpoints"'
NEEDS = {"2": ("peft",), "3": ("trl", "datasets"), "4": ("trl", "datasets")}


def code(section: str, language: str, page: str = PAGE) -> list[str]:
    """The blocks of code below the heading that begins so."""
    text = re.split(r"^##+ ", page, flags=re.MULTILINE)
    (found,) = (part for part in text if part.startswith(section))
    return re.findall(rf"^```{language}\n(.*?)^```$", found, re.DOTALL | re.MULTILINE)


def recipe_of(number: str) -> str:
    """The script as it is run here."""
    (script,) = code(f"{number}. ", "python")
    return as_run(script)


def as_run(script: str) -> str:
    """The script with a rate that shows in a few steps, and on the CPU where there is no GPU."""
    script = RATES.sub(RATE, script)
    return script if torch.cuda.is_available() else script.replace(OUTPUT, f"{OUTPUT}, use_cpu=True")


@pytest.fixture
def home(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what the scripts of the page name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "model")
    text = (folder / "data.txt").read_text()
    pieces = [text[i : i + 60] for i in range(0, 40 * 60, 60)]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": piece}) for piece in pieces))
    pairs = [{"prompt": piece, "chosen": piece[:30], "rejected": piece[30:]} for piece in pieces[:12]]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (tmp_path / "config.json").write_text(code("Recipes", "json")[0])
    return tmp_path


def loss_of(model: Any, home: Path) -> float:
    """On the data of the recipes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    rows = [json.loads(line)["text"] for line in (home / "data.jsonl").read_text().splitlines()]
    ids = torch.tensor([tokenizer(row)["input_ids"][:10] for row in rows])
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def expect_trained(home: Path, recipe: str) -> None:
    """`tuned` is a folder that loads, and that has learnt."""
    base = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    before = loss_of(base, home)
    if recipe == "2":
        import peft

        assert not list((home / "tuned").glob("model*.safetensors"))
        tuned = peft.PeftModel.from_pretrained(base, "tuned")
    else:
        tuned = transformers.AutoModelForCausalLM.from_pretrained("tuned")
        assert tuned.dtype == torch.bfloat16
    if recipe == "3":  # it learns to prefer
        assert loss_of(tuned, home) != before
    else:
        assert loss_of(tuned, home) < before - 0.1


@pytest.mark.parametrize("recipe", ["1", "2", "3", "4"])
def test_a_recipe_trains(recipe: str, home: Path) -> None:
    for needed in NEEDS.get(recipe, ()):
        pytest.importorskip(needed)
    script = recipe_of(recipe)
    assert len(script.splitlines()) <= 40
    forget_accelerate()
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, f"recipe {recipe}", "exec"), names)
    expect_trained(home, recipe)


def plain_of(script: str) -> str:
    """The same script without offloading."""
    script = re.sub(r"^import offloadzero\.integrations\.\w+\n", "", script, flags=re.MULTILINE)
    script = re.sub(r"^with offloadzero\.zero\.Init\(.*\):\n    ", "", script, flags=re.MULTILINE)
    script = script.replace('    offload_config="config.json",\n', "")
    return script.replace("offloadzero.integrations.", "")


def changed_lines(recipe: str, sign: str) -> list[str]:
    (script,) = code(f"{recipe}. ", "python")
    diff = list(difflib.unified_diff(plain_of(script).splitlines(), script.splitlines(), n=0))[2:]
    return [line for line in diff if line.startswith(sign)]


@pytest.mark.parametrize("recipe", ["1", "2", "3", "4"])
def test_a_recipe_has_five_lines_more_than_the_plain_script(recipe: str) -> None:
    assert len(changed_lines(recipe, "+")) == 5
    assert len(changed_lines(recipe, "-")) == 2  # the two that it writes anew


@pytest.mark.parametrize("recipe", ["1", "4"])
def test_a_recipe_without_the_five_lines_is_a_plain_script(recipe: str, home: Path) -> None:
    for needed in NEEDS.get(recipe, ()):
        pytest.importorskip(needed)
    script = plain_of(recipe_of(recipe))
    assert "offload" not in script
    forget_accelerate()
    exec(compile(script, f"plain {recipe}", "exec"), {"__name__": "__main__"})
    tuned = transformers.AutoModelForCausalLM.from_pretrained("tuned", dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    assert loss_of(tuned, home) < loss_of(base, home) - 0.1


def test_the_page_shows_the_five_lines() -> None:
    (shown,) = code("The five lines", "diff")
    for sign in "+-":
        assert [line for line in shown.splitlines() if line.startswith(sign)] == changed_lines("1", sign)


def test_a_class_of_ones_own_is_made_as_the_page_says() -> None:
    trl = pytest.importorskip("trl")
    (script,) = code("The five lines", "python")
    names: dict[str, Any] = {"trl": trl}
    exec(compile(script, "fine-tuning.md", "exec"), names)
    assert issubclass(names["KTOTrainer"], trl.KTOTrainer)


def test_the_second_recipe_trains_over_a_base_of_four_bits(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    (loading,) = code("LoRA over a 4-bit base", "python")
    script = recipe_of("2")
    first, last = script.index("with offloadzero.zero.Init"), script.index("adapters = peft.")
    forget_accelerate()
    seen = []

    original = offloadzero.offload

    def offload(model: Any, *arguments: Any) -> Any:
        seen.extend(type(param).__name__ for param in model.parameters())
        return original(model, *arguments)

    monkeypatch.setattr("offloadzero.integrations.transformers.offload", offload)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(f"{script[:first]}{loading}{script[last:]}", "recipe", "exec"), names)
    assert seen.count("Params4bit") == 3 * 7
    expect_trained(home, "2")


def test_a_recipe_runs_on_several_ranks(home: Path) -> None:
    (command,) = code("5. ", "bash")
    (home / "recipe.py").write_text(recipe_of("1"))
    _, option, number, script, *words = command.split()
    assert (option, number) == ("--nproc-per-node", "8")
    run = run_torchrun(home / script, *words, cwd=home, timeout_s=110)
    assert run.returncode == 0, run.stderr
    assert not any((home / "offload-files").iterdir())  # though nothing is closed
    expect_trained(home, "5")


def test_the_lines_of_the_readme_fine_tune(home: Path) -> None:
    (script,) = code("Fine-tune", "python", README)
    assert len(script.splitlines()) == 10
    (home / "config.json").write_text(code("Your loop", "json", README)[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    tokenizer.pad_token = tokenizer.eos_token
    lines = (home / "data.jsonl").read_text().splitlines()
    names: dict[str, Any] = {
        "transformers": transformers,
        "tokenizer": tokenizer,
        "rows": [tokenizer(json.loads(line)["text"]) for line in lines],
    }
    forget_accelerate()
    exec(compile(as_run(script), "README.md", "exec"), names)
    expect_trained(home, "readme")


def test_the_loop_of_the_page(home: Path) -> None:
    (script,) = code("A loop of your own", "python")
    config = json.loads((home / "config.json").read_text())
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    (home / "config.json").write_text(json.dumps({**config, "optimizer": optimizer}))
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    lines = (home / "data.jsonl").read_text().splitlines()
    ids = [tokenizer(json.loads(row)["text"])["input_ids"][:10] for row in lines]
    batches = [{"input_ids": part, "labels": part} for part in torch.tensor(ids).split(8)]
    names: dict[str, Any] = {"batches": batches}
    exec(compile(script, "fine-tuning.md", "exec"), names)
    names["engine"].close()
    expect_trained(home, "loop")


def rows() -> list[list[str]]:
    """The table of figures, without its head."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[1].startswith("`llama:")]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[1]} {row[3]}")
def test_the_figures_are_those_of_the_plan(
    row: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offloadzero.cli.plan.measure.resident_bytes", lambda: PROCESS_BYTES)
    recipes, model, machine, configuration, *figures = (cell.strip("`") for cell in row)
    config = json.loads(code("Recipes", "json")[0])
    if configuration == "compact.json":
        config["offloadzero"]["state_layout"] = "compact"
    (tmp_path / configuration).write_text(json.dumps(config))
    (command,) = re.findall(r"^offloadzero (plan .*)$", PAGE, re.MULTILINE)
    for word, value in (
        ("MODEL", model),
        ("CONFIGURATION", str(tmp_path / configuration)),
        ("MACHINE", machine),
    ):
        assert f" {word}" in command
        command = command.replace(f" {word}", f" {value}")
    assert main([*command.split(), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    tiers = [found["needed"].get(tier, 0) for tier in ("device", "host", "nvme")]
    tiers[2] -= found["beside"]["waiting"]
    now = [f"{num_bytes / 2**30:.1f}" for num_bytes in tiers]
    now += [f"{found['forecast']['seconds']:.3g}", f"{found['forecast']['tokens_per_s']:,.0f}"]
    assert now == figures, f"now: {' | '.join(now)} (recipes {recipes})"
