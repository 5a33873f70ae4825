"""The examples are run: the model, its text, plain training, and the script with each configuration."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny import script_environment
from tests.support.warm import run_warm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import gpt_model  # noqa: E402
import plain_torch  # noqa: E402

MICRO = gpt_model.GPTSize(num_layers=2, width=32, num_heads=4)
SENTENCE = b"the states live elsewhere and the numbers stay the same. "
CONFIG_NAMES = ("resident", "host", "nvme", "mixed")


def micro_model(**options: Any) -> gpt_model.GPT:
    torch.manual_seed(0)
    return gpt_model.GPT(MICRO, seq_len=16, **options)


def random_tokens(batch_size: int = 3, seq_len: int = 16, *, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (batch_size, seq_len), generator=generator)


def load_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((EXAMPLES / "configs" / f"{name}.json").read_text())
    return config


# --- the model


def test_logits_have_one_row_per_token_for_full_and_shorter_inputs() -> None:
    model = micro_model()
    assert model(random_tokens()).shape == (3, 16, 256)
    assert model(random_tokens(1, 7)).shape == (1, 7, 256)


def test_loss_of_an_untrained_model_is_about_uniform() -> None:
    loss = micro_model()(random_tokens(), random_tokens(seed=2))
    assert loss.shape == ()
    assert loss.item() == pytest.approx(math.log(256), abs=0.2)


def test_a_token_does_not_see_what_comes_after_it() -> None:
    model, tokens = micro_model(), random_tokens()
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_the_head_is_the_embedding_only_when_tied() -> None:
    tied, untied = micro_model(), micro_model(tied=False)
    assert tied.head.weight is tied.tokens.weight
    assert untied.head.weight is not untied.tokens.weight
    for model, is_tied in ((tied, True), (untied, False)):
        built = sum(p.numel() for p in model.parameters())
        assert gpt_model.num_params(MICRO, seq_len=16, tied=is_tied) == built


def test_checkpointed_activations_change_no_gradient() -> None:
    gradients = []
    for checkpoint_activations in (False, True):
        model = micro_model(checkpoint_activations=checkpoint_activations)
        model(random_tokens(), random_tokens()).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("name", "least", "most"), [("tiny", 1e6, 3e6), ("160m", 145e6, 165e6), ("10b", 10e9, 10.5e9)]
)
def test_sizes_are_what_they_are_called(name: str, least: float, most: float) -> None:
    assert least <= gpt_model.num_params(gpt_model.SIZES[name], seq_len=256) <= most


# --- the text


def test_held_out_text_is_the_tail_and_not_trained_on() -> None:
    data = bytes(i % 251 for i in range(10_007))
    text = gpt_model.Text(data)
    assert bytes(text.train.tolist()) + bytes(text.held_out.tolist()) == data
    assert len(text.held_out) == 1000


def test_batches_repeat_with_the_seed_and_targets_are_the_next_bytes() -> None:
    text = gpt_model.Text(bytes(torch.randint(256, (5000,)).tolist()))

    def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return text.batch(batch_size=4, seq_len=33, generator=torch.Generator().manual_seed(seed))

    (tokens, targets), (again, _), (other, _) = draw(5), draw(5), draw(6)
    assert tokens.shape == targets.shape == (4, 33)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)


def test_validation_windows_are_fixed_and_inside_the_held_out_text() -> None:
    data = bytes(9000) + bytes([7]) * 1000
    text = gpt_model.Text(data)
    batches = list(text.validation_batches(batch_size=3, seq_len=50, num_batches=5))
    assert len(batches) == 5
    assert all((tokens == 7).all() and tokens.shape == (3, 50) for tokens, _ in batches)


def test_text_is_read_from_a_file_and_from_a_directory_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"B" * 30)
    (tmp_path / "a.txt").write_bytes(b"A" * 30)
    assert bytes(gpt_model.Text.load(tmp_path).train.tolist()) == b"A" * 30 + b"B" * 24
    assert bytes(gpt_model.Text.load(tmp_path / "b.txt").train.tolist()) == b"B" * 27
    assert gpt_model.read_files([tmp_path / "a.txt", tmp_path / "b.txt"], max_bytes=31) == b"A" * 30 + b"B"


def test_too_little_text_is_an_error() -> None:
    text = gpt_model.Text(b"x" * 100)
    with pytest.raises(ValueError, match="90 bytes of text are too few for sequences of 90 bytes"):
        text.batch(batch_size=1, seq_len=90, generator=torch.Generator())


def test_the_default_text_is_python_source_without_installed_packages() -> None:
    sources = list(gpt_model.stdlib_sources())
    assert sources == sorted(sources)
    assert any(path.name == "argparse.py" for path in sources)
    assert not any(path.match("site-packages/**/*.py") or "site-packages" in path.parts for path in sources)


# --- plain training


def test_plain_training_learns_a_sentence_and_keeps_fp32_masters() -> None:
    text = gpt_model.Text(SENTENCE * 40)
    trainer = plain_torch.PlainTrainer(micro_model(), load_config("resident"))
    generator = torch.Generator().manual_seed(0)
    losses = [
        float(trainer.step(*text.batch(batch_size=8, seq_len=16, generator=generator))) for _ in range(300)
    ]
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert losses[-1] < 1.0
    assert trainer.evaluate(text, batch_size=4, seq_len=16) < 1.0
    assert {p.dtype for p in trainer.parameters} == {torch.bfloat16}
    for parameter, master in zip(trainer.parameters, trainer.masters, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(parameter, master.bfloat16())


def test_plain_training_clips_the_global_norm() -> None:
    trainer = plain_torch.PlainTrainer(micro_model(), load_config("resident") | {"gradient_clipping": 0.01})
    norms = []

    def record_norm(*_: object) -> None:
        norms.append(math.sqrt(sum(float(m.grad.double().square().sum()) for m in trainer.masters)))

    trainer.optimizer.register_step_pre_hook(record_norm)
    trainer.step(random_tokens(), random_tokens())
    assert norms == [pytest.approx(0.01, rel=1e-3)]


def test_warm_up_rises_linearly_from_zero_and_then_stays() -> None:
    """DeepSpeed's WarmupLR: the first step runs at the minimum, and step n at (n - 1) / warm-up steps."""
    factor = plain_torch.warmup_factor({"scheduler": {"params": {"warmup_num_steps": 4}}})
    assert [factor(step) for step in range(8)] == [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert plain_torch.warmup_factor({})(0) == 1


# --- the configurations


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_configurations_differ_only_in_where_states_live(name: str) -> None:
    placement = {"zero_optimization", "offloadzero"}
    config, resident = load_config(name), load_config("resident")
    assert {k: v for k, v in config.items() if k not in placement} == {
        k: v for k, v in resident.items() if k not in placement
    }
    assert config["zero_optimization"]["stage"] == 3


# --- the script


def run_script(directory: Path, config: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    """`train_gpt.py` in `directory`, which also gets the text and the place for the files."""
    (directory / "offload-files").mkdir(parents=True)
    (directory / "text").write_bytes(SENTENCE * 40)
    (directory / "config.json").write_text(json.dumps(config))
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), "--config", "config.json", "--data", "text"]
    words = [*command, "--seq-len", "16", *options]
    return run_warm(words, cwd=directory, env=script_environment(), timeout_s=120)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """Output and log of four steps with each shipped configuration, of fewer sequences than it has.

    Many cores multiply bf16 so slowly that its sixteen are most of the time.
    """
    results = {}
    for name in CONFIG_NAMES:
        directory = tmp_path_factory.mktemp("train") / name
        config = load_config(name) | {"train_micro_batch_size_per_gpu": 2}
        done = run_script(directory, config, "--steps", "4", "--log", "log.jsonl")
        assert done.returncode == 0, done.stderr
        assert not list((directory / "offload-files").iterdir())
        rows = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
        results[name] = (done.stdout, rows)
    return results


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_script_reports_memory_progress_and_validation(name: str, runs: Any) -> None:
    output, rows = runs[name]
    assert re.search(r"^device +[0-9.]+ [KM]iB$", output, re.MULTILINE)
    assert ("offload-files/" in output) == (name in ("nvme", "mixed"))
    assert re.search(r"^step 4/4: loss [0-9.]+, [0-9]+ tokens/s, [0-9.]+ s in waits$", output, re.MULTILINE)
    assert re.search(r"^validation loss [0-9.]+ nats/byte, [0-9]+ tokens/s", output, re.MULTILINE)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["wait_s"] >= 0 for row in rows)
    assert rows[0]["loss"] == pytest.approx(math.log(256), abs=0.2)


@pytest.mark.parametrize("name", CONFIG_NAMES[1:])
def test_losses_do_not_depend_on_where_states_live(name: str, runs: Any) -> None:
    (resident_output, resident_rows), (output, rows) = runs["resident"], runs[name]
    assert [row["loss"] for row in rows] == [row["loss"] for row in resident_rows]
    validation = re.compile(r"validation loss [0-9.]+")
    assert validation.findall(output) == validation.findall(resident_output)


def test_an_accumulated_step_counts_all_its_micro_batches(tmp_path: Path) -> None:
    config = load_config("host") | {"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 2}
    done = run_script(tmp_path / "run", config, "--steps", "2", "--log", "log.jsonl", "--untied")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 2


def test_a_wrong_key_is_one_clear_line(tmp_path: Path) -> None:
    config = load_config("nvme")
    config["gradient_cliping"] = config.pop("gradient_clipping")
    done = run_script(tmp_path / "run", config, "--steps", "1")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [done.stderr.strip()]
    assert done.stderr.startswith("ConfigError: gradient_cliping = 1.0: ")
    assert "did you mean 'gradient_clipping'?" in done.stderr


def test_a_missing_directory_is_one_clear_line(tmp_path: Path) -> None:
    config = load_config("nvme")
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = "no-such-directory/train"
    done = run_script(tmp_path / "run", config, "--steps", "1")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [done.stderr.strip()]
    assert done.stderr.startswith("ConfigError: ")
    assert "no-such-directory" in done.stderr
