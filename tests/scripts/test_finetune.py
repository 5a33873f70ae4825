"""examples/finetune.py: against a plain loop, interrupted and resumed, adapters, two ranks, and what it reads."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.utils import clip_grad_norm_

from offloadzero.cli.main import main
from tests.support.ranks import run_torchrun

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import finetune  # noqa: E402

STEPS, LR, SEQ_LEN = 6, 1e-3, 32
DATA = ("data.txt", "data.jsonl")  # all tokens are trained on; few of a block, and not as many of each


def config_file(path: Path, **own: Any) -> Path:
    """fp32, all on NVMe."""
    files = {"device": "nvme", "nvme_path": str(path)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3, "offload_param": files, "offload_optimizer": files},
        "offloadzero": {"device": "cpu"},
    }
    (path / "config.json").write_text(json.dumps({**config, **own}))
    return path / "config.json"


def arguments(folder: Path, output: Path, *more: str, data: str = "data.txt") -> list[str]:
    given = {"model": folder, "data": folder / data, "output": output, "steps": STEPS}
    given |= {"lr": LR, "seq-len": SEQ_LEN}
    return ["--no-plan", *(f"--{name}={value}" for name, value in given.items()), *more]


def plain_loop(
    folder: Path, data: str = "data.txt", *, world_size: int = 1
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The same in plain torch, resident, with the blocks of a step as one batch: the weights, and what is logged."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    blocks = finetune.Blocks(folder / data, tokenizer, SEQ_LEN)
    window = 4 * world_size
    said = []
    for step in range(STEPS):
        inputs = blocks.batch(step * window, window, 0)
        loss = model(**inputs).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = LR * (1 - 0.9 * step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        said.append(f"step {step + 1}/{STEPS}: loss {loss.item():.4f}")
    ((inputs, _),) = blocks.held_out(1000, 0, 1)
    with torch.no_grad():
        said.append(f"step {STEPS}/{STEPS}: evaluation loss {model(**inputs).loss.item():.4f}")
    return dict(model.named_parameters()), said


def expect_close(saved: Path, expected: dict[str, torch.Tensor]) -> None:
    loaded = dict(transformers.AutoModelForCausalLM.from_pretrained(saved).named_parameters())
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("data", DATA)
def test_the_saved_folder_is_what_a_plain_loop_trains(
    folder: Path,
    tmp_path: Path,
    data: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(finetune, "LINE_STEPS", 1)
    config = config_file(tmp_path)
    assert finetune.main(arguments(folder, tmp_path / "out", f"--config={config}", data=data)) == 0
    weights, said = plain_loop(folder, data)
    expect_close(tmp_path / "out", weights)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").use_cache
    assert said == [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize("more", [(), ("--lora=2",)], ids=["full", "lora"])
def test_ctrl_c_and_the_same_command_again_is_one_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """Bitwise, with dropout and the default configuration (bf16, placement by what is free)."""
    if more:
        pytest.importorskip("peft")
    shutil.copytree(folder, folder := tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    more = (*more, "--accumulation=2")
    assert finetune.main(arguments(folder, whole, *more)) == 0
    backward = finetune.backward
    calls = 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        assert not args[0].module.config.use_cache, "recomputed activations would extend it"
        if calls == 5:  # in the third step
            signal.raise_signal(signal.SIGINT)
        return backward(*args)

    with monkeypatch.context() as patch:
        patch.setattr(finetune, "backward", interrupted)
        assert finetune.main(arguments(folder, broken, *more)) == finetune.INTERRUPTED
    assert calls == 6
    monkeypatch.setattr(finetune, "backward", lambda *args: (calls_after.append(0), backward(*args))[1])
    calls_after: list[int] = []
    assert finetune.main(arguments(folder, broken, *more)) == 0
    assert len(calls_after) == 2 * (STEPS - 3)
    (name,) = (path.name for path in whole.glob("*.safetensors"))
    expected, found = load_file(whole / name), load_file(broken / name)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_adapters_alone_are_trained_and_saved(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    assert finetune.main(arguments(folder, tmp_path, "--lora=2", "--accumulation=1")) == 0
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert not (tmp_path / "model.safetensors").exists()
    saved = [*(tmp_path / "checkpoints" / "last").glob("unit-*.safetensors")]
    assert saved
    assert all("lora_" in name for file in saved for name in load_file(file)), "the base is where it was"
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    second = [value for name, value in loaded.named_parameters() if "lora_B" in name]
    assert len(second) == 7 * 3
    assert all(value.abs().max() > 0 for value in second), "they begin at zero"


def test_adapters_over_a_base_of_four_bits(folder: Path, tmp_path: Path) -> None:
    """Saved in the midst, and gone on with."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    four_bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=four_bits, device_map={"": "cpu"}
    )
    model.save_pretrained(base := tmp_path / "base")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(base)
    given = [*arguments(folder, tmp_path / "out", "--lora=2", "--accumulation=1"), f"--model={base}"]
    assert finetune.main([*given, "--steps=1"]) == 0
    assert finetune.main(given) == 0
    adapters = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(value.abs().max() > 0 for value in adapters.values())


def test_two_ranks_train_what_one_does_on_their_batches(folder: Path, tmp_path: Path) -> None:
    data = DATA[1]
    config = config_file(tmp_path)
    words = [*arguments(folder, tmp_path / "out", data=data)[1:], f"--config={config}"]
    run = run_torchrun(ROOT / "examples" / "finetune.py", *words, cwd=tmp_path, timeout_s=110)
    assert run.returncode == 0, run.stderr
    assert "One of 2 ranks, by stage of ZeRO:" in run.stdout
    weights, said = plain_loop(folder, data, world_size=2)
    assert said[-1] in run.stdout
    expect_close(tmp_path / "out", weights)


def test_the_plan_is_said_before_anything_is_built(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of adapters, in bytes (measuring takes a minute), and a run that does not fit does not begin."""
    pytest.importorskip("peft")

    def run(words: Sequence[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        python, option, package, *rest = words
        assert (python, option, package, check) == (sys.executable, "-m", "offloadzero", False)
        return subprocess.CompletedProcess(words, main([*rest, "--no-time"]))

    monkeypatch.setattr(subprocess, "run", run)
    given = arguments(folder, tmp_path, "--lora=2")[1:]
    assert finetune.main(given) == 0
    said = capfd.readouterr().out
    assert "with adapters of rank 2 (LlamaForCausalLM)" in said
    assert said.index("It fits.") < said.index(f"step {STEPS}/{STEPS}: evaluation loss")
    assert f"saved to {tmp_path}: adapters in bfloat16" in said
    own = {"device": "cpu", "placement": "host", "budgets": {"host": "1KiB"}}
    config = config_file(tmp_path, offloadzero=own)
    assert finetune.main([*given, f"--config={config}", f"--output={tmp_path / 'none'}"]) == 1
    said = capfd.readouterr()
    assert "The smallest change with which it fits: " in said.out
    assert "nothing was started: see the plan" in said.err


def test_what_is_read_of_a_jsonl_file(folder: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows: list[dict[str, Any]] = [
        {"text": "one\u2028"},
        {"prompt": "two: ", "completion": "three"},
        {"messages": [{"role": "user", "content": "four"}]},
    ]
    data = tmp_path / "data.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    data.write_text("\n\n".join(lines) + "\n \n")
    found = list(finetune.examples(data, tokenizer))
    assert [tokenizer.decode(ids) for ids, _ in found] == [
        "one\u2028</s>",
        "two: three</s>",
        "user: four</s>",
    ]
    assert [tokenizer.decode(ids[first:]) for ids, first in found] == [
        "one\u2028</s>",
        "three</s>",
        "user: four</s>",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n{"body": "b"}', 'data.jsonl:2: has body, and not "text", "prompt"'),
        ('{"text": "a"}', "data.jsonl: 2 tokens, which make 0; needed are two blocks of --seq-len 32"),
        ('{"text": "a"}\n{"text', "data.jsonl:2: Unterminated string"),
        ("[1, 2]", "data.jsonl:1: no JSON object whose text"),
        ('{"text": 3}', "data.jsonl:1: no JSON object whose text"),
    ],
)
def test_data_that_cannot_be_used(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    assert finetune.main([*arguments(folder, tmp_path), f"--data={data}"]) == 1
    assert message in capsys.readouterr().err


def test_blocks_without_a_completion_are_left_out(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join([json.dumps({"prompt": "long " * 100, "completion": "yes"})] * 6))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    blocks = finetune.Blocks(data, tokenizer, SEQ_LEN)
    assert 2 <= len(blocks) + 1 <= 12
    for position in range(len(blocks)):
        assert (blocks.batch(position, 1, 0)["labels"][:, 1:] != finetune.IGNORED).any()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model=/nowhere"], "--model /nowhere: no folder of a model"),
        (["--data=/nowhere.txt"], "--data /nowhere.txt: does not exist"),
        (["--output={folder}"], "is the folder of --model, which would be overwritten"),
    ],
)
def test_folders_that_cannot_be_used(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    given = [text.format(folder=folder) for text in more]
    assert finetune.main([*arguments(folder, tmp_path / "out"), *given]) == 1
    assert message in capsys.readouterr().err


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first forward: a GPU would end the process."""
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    few = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, **size))
    few.save_pretrained(model := tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(model)
    assert finetune.main([*arguments(folder, tmp_path / "out"), f"--model={model}"]) == 1
    assert "and it has 9 embeddings: resize_token_embeddings()" in capsys.readouterr().err


def test_another_run_is_not_gone_on_with(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*arguments(folder, tmp_path), "--accumulation=1", "--steps=1"]
    assert finetune.main(given) == 0
    for other in ("--seed=1", f"--data={folder / DATA[1]}"):
        assert finetune.main([*given, other]) == 1
        assert "was begun with {'seq_len': 32, 'seed': 0, 'lora': None, 'blocks': " in capsys.readouterr().err


def test_another_batch_goes_on_at_the_next_block(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    batch = finetune.Blocks.batch

    def noted(blocks: finetune.Blocks, first: int, size: int, seed: int) -> Any:
        taken.extend(range(first, first + size))
        return batch(blocks, first, size, seed)

    monkeypatch.setattr(finetune.Blocks, "batch", noted)
    for more, num_blocks in (
        (["--micro-batch=2", "--accumulation=2", "--steps=1"], 4),
        (["--accumulation=3", "--steps=3"], 10),
    ):
        assert finetune.main([*arguments(folder, tmp_path), *more]) == 0
        assert taken == list(range(num_blocks))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    in_epoch = len(finetune.Blocks(folder / DATA[0], tokenizer, SEQ_LEN))
    given = [text for text in arguments(folder, tmp_path) if not text.startswith("--steps")]
    for _ in range(2):  # the second time it is at the end
        assert finetune.main([*given, "--micro-batch=4", "--accumulation=1"]) == 0
        assert taken == list(range(in_epoch + (10 - in_epoch) % 4))


def test_rates_of_a_configuration_are_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Muon has two; they fall with the steps, also of a run that goes on, and --lr replaces them."""
    seen = []
    set_rate = finetune.set_rate

    def noted(engine: Any, *given: Any) -> None:
        set_rate(engine, *given)
        seen.append([group["lr"] for group in engine.optimizer.param_groups])

    monkeypatch.setattr(finetune, "set_rate", noted)
    muon = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-4}}
    config = config_file(tmp_path, optimizer=muon)
    given = [text for text in arguments(folder, tmp_path / "out") if not text.startswith("--lr")]
    for more in (["--steps=1"], ["--steps=2"], ["--steps=3", "--lr=0.5"]):
        assert finetune.main([*given, f"--config={config}", *more]) == 0
    assert seen == [[0.02, 3e-4], [0.02 * 0.55, 3e-4 * 0.55], [0.5 * 0.4, 0.5 * 0.4]]


def test_a_masked_language_model(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    source = tmp_path / "bert"
    transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=304, **size)).save_pretrained(source)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(source)
    given = arguments(folder, tmp_path / "out", "--accumulation=1")
    assert finetune.main([*given, f"--model={source}"]) == 0
    before, after = (
        transformers.BertForMaskedLM.from_pretrained(path, dtype=torch.float32)
        for path in (source, tmp_path / "out")
    )
    changed = [
        name
        for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(old, new)
    ]
    assert "cls.predictions.bias" in changed
    assert len(changed) > 30
