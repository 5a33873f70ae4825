"""Every block of code in the documents is run, read or checked; `text` marks what is output."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import offloadzero
from offloadzero.cli.main import make_parser
from offloadzero.config import load_config
from offloadzero.planning.cluster import cluster_from_json
from tests.support.tiny import TinyModel, make_engine, run_script, settings, tokens, train

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# tests/scripts/test_fine_tuning_page.py runs these.
OF_ANOTHER_TEST = {
    ("docs/fine-tuning.md", "python"),
    ("docs/fine-tuning.md", "diff"),
    ("README.md", "python"),
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


BLOCKS = [
    (name_of(page), language, text, text.partition("\n")[0][:40])
    for page in PAGES
    for language, text in BLOCK.findall(page.read_text())
]


def blocks(*languages: str) -> Any:
    """Parametrize a test by the blocks in these languages, but for those of another test."""
    found = [
        pytest.param(page, text, id=f"{page}: {first}")
        for page, language, text, first in BLOCKS
        if language in languages and (page, language) not in OF_ANOTHER_TEST
    ]
    return pytest.mark.parametrize(("page", "text"), found)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_says_its_language(page: Path) -> None:
    text = page.read_text()
    assert {language for language, _ in BLOCK.findall(text)} <= {"python", "diff", "json", "bash", "text"}
    outside = BLOCK.sub("", text)
    assert "```" not in outside
    options = r"    options: "  # of the generated pages of the API
    assert re.findall(rf"^(?:\n)?(?!{options})(?: {{4}}|\t)\S.*$", outside, re.MULTILINE) == []


@blocks("json")
def test_a_configuration_is_taken(
    page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value = json.loads(text.replace("/mnt/nvme", f"{tmp_path}/nvme").replace("/train", ""))
    if "format" in value:
        assert cluster_from_json("hardware", value).num_machines > 1
    else:
        assert load_config(value).notices == (), page


# --- commands ---

KNOWN_PROGRAMS = {"pip", "make", "python", "torchrun", "offloadzero"}


def expect_options(script: Path, words: list[str]) -> None:
    """Each option of the words is one that the script's text has."""
    text = script.read_text()
    assert [word for word in words if word.startswith("--") and f'"{word}"' not in text] == []


@blocks("bash")
def test_a_command_is_one(page: str, text: str) -> None:
    for line in text.splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program in KNOWN_PROGRAMS, page
        if program == "offloadzero":
            make_parser().parse_args(words)
        elif program == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(words) <= set(targets)
        elif program == "pip":
            assert words[0] == "install"
        else:
            scripts = [word for word in words if word.endswith(".py")]
            assert len(scripts) == 1
            script = ROOT / scripts[0]
            if scripts[0] != "recipe.py":  # of the page itself, under a name that it proposes
                expect_options(script, words[words.index(scripts[0]) :])


# --- Python ---


class TakesTargets(TinyModel):
    """Called as the models of the pages are."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        assert torch.equal(tokens, targets)
        return super().forward(tokens)


class Experts(nn.Module):
    """What a page calls SparseMoeBlock."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


def nothing() -> dict[str, Any]:
    return {}


def engine_that_has_trained() -> dict[str, Any]:
    engine = make_engine(settings(placement="host"))
    train(engine, num_steps=1)
    durable = settings(Path.cwd(), placement="nvme", durable=True)
    names = {"model": TinyModel(), "config": durable, "batches": [tokens(0), tokens(1)], "num_steps": 2}
    return {"engine": engine, "offloadzero": offloadzero, **names}


def engine_with_data() -> dict[str, Any]:
    """After three micro batches of the second epoch: of four each, and one a step."""
    data = torch.arange(8 * 6).view(8, 6) % 50
    engine, _, loader, _ = offloadzero.initialize(
        model=TinyModel(), config=settings(placement="host"), training_data=data
    )
    assert loader is not None
    for batch in [*loader, *itertools.islice(loader, 3)]:
        engine.backward(engine(batch))
        engine.step()
    return {"engine": engine, "loader": loader}


def matrices_and_others() -> dict[str, Any]:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    model = TinyModel()
    blocks = list(model.blocks.parameters())
    matrices = [param for param in blocks if param.dim() == 2]
    ids = {id(param) for param in matrices}
    others = [param for param in model.parameters() if id(param) not in ids]
    config = settings(placement="host", optimizer=None)
    return {
        "torch": torch,
        "offload": offloadzero.offload,
        "model": model,
        "matrices": matrices,
        "others": others,
        "config": config,
    }


def diff_names() -> dict[str, Any]:
    return {
        "torch": torch,
        "GPT": lambda _: TakesTargets(),
        "batches": [(tokens(0), tokens(0))] * 5,
        "model": TinyModel(),
    }


NAMES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "docs/index.md": nothing,
    "docs/checkpoints.md": engine_that_has_trained,
    "docs/engine.md": matrices_and_others,
    "docs/from-deepspeed.md": engine_with_data,
    "docs/ranks.md": lambda: {
        "transformers": transformers,
        "model": nn.Sequential(Experts(), Experts()),
        "SparseMoeBlock": Experts,
    },
}
ON_FOUR_RANKS = """
import torch
import torch.testing._internal.distributed.fake_pg
from torch.distributed import init_device_mesh
import offloadzero
from tests.support.tiny import TinyModel, settings

torch.distributed.init_process_group("fake", rank=0, world_size=4)
part_of_model, config = TinyModel(), settings(placement="host")
"""


@blocks("python")
def test_python_runs(page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "init_device_mesh" in text:
        text = text if torch.cuda.is_available() else text.replace('"cuda"', '"cpu"')
        done = "assert engine.dp_world_size == 2\nengine.close()"
        run = run_script(f"{ON_FOUR_RANKS}\n{text}\n{done}")
        assert run.returncode == 0, run.stderr
        return
    names = NAMES[page]()
    exec(compile(text, page, "exec"), names)
    for name in ("engine", "optimizer"):
        if hasattr(names.get(name), "close"):
            names[name].close()


def test_a_resumed_epoch_goes_on_with_the_batch_that_is_next() -> None:
    (text,) = [
        text for page, kind, text, _ in BLOCKS if page == "docs/from-deepspeed.md" and kind == "python"
    ]
    names = engine_with_data()
    exec(compile(text, "from-deepspeed.md", "exec"), names)
    names["loader"].sampler.set_epoch(1)
    (left,) = names["rest"]
    assert torch.equal(left, list(names["loader"])[3])
    names["engine"].close()


def new_side(diff: str) -> str:
    """What the lines of a diff become; `losses` gets the loss of each step."""
    new = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    return re.sub(r"^(    loss = .*)$", r"\1; losses.append(loss.item())", new, flags=re.MULTILINE)


@blocks("diff")
def test_what_a_diff_makes_of_a_script_runs(
    page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains, where it is a loop: the model learns."""
    monkeypatch.chdir(tmp_path)
    (config,) = [
        block for of, language, block, _ in BLOCKS if of == page and language == "json" and "bf16" in block
    ] or [json.dumps(settings(placement="host"))]
    (tmp_path / "config.json").write_text(config)
    losses: list[float] = []
    names = {**diff_names(), "losses": losses}
    torch.manual_seed(1)
    exec(compile(new_side(text), page, "exec"), names)
    if "loss" in text:
        assert len(losses) == 5
        assert losses[-1] < losses[0]
    if "restore_model" in text:
        assert type(next(names["model"].parameters())) is nn.Parameter
    elif "loss" in text:
        (names.get("engine") or names["optimizer"]).close()


def test_the_figure_is_drawn_from_its_page() -> None:
    figures = runpy.run_path(str(ROOT / "docs" / "site" / "figures.py"))
    values = figures["measured"](figures["TABLE"].read_text())
    assert set(values) == set(figures["NAMES"])
    assert figures["FIGURE"].read_text() == figures["draw"](values)


def test_the_command_line_page_has_every_option() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    sections = dict(
        re.findall(r"^## `offloadzero ([\w ]+)`\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    )
    parsers = commands(make_parser())
    assert set(sections) == set(parsers)
    for name, parser in parsers.items():
        options = {word for action in parser._actions for word in action.option_strings} - {"-h", "--help"}
        assert options == set(re.findall(r"`(--?[\w-]+)`", sections[name])), name


def commands(parser: Any, path: str = "") -> dict[str, Any]:
    """The parsers of the commands by their names."""
    choices = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    if not choices:
        return {path.strip(): parser}
    return {
        name: one
        for word, below in choices[0].items()
        for name, one in commands(below, f"{path} {word}").items()
    }
