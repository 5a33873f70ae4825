"""`offloadzero demo`: a small GPT trained on this machine with its states in files, and what came of it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloadzero.cli.doctor import find_facts, machine_lines
from offloadzero.cli.output import print_lines, save_json, text_table
from offloadzero.cli.report import LANE_COLUMNS, lane_rows, read_steps, summary
from offloadzero.config import read_config_file
from offloadzero.errors import ConfigError
from offloadzero.observe.monitor import STEPS_FILE

if TYPE_CHECKING:  # else it loads torch for `--help`
    from offloadzero.api.engine import Engine
    from offloadzero.cli.demo.gpt_model import Text

OWN_CONFIG = Path(__file__).with_name("nvme.json")
TRAIN_S = 30.0
LINE_EVERY_S = 3.0
SEQ_LEN = 128
NUM_VALIDATION_BATCHES = 8


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small GPT on this machine, in under a minute",
        description="Trains a small GPT on the sources of Python's standard library, with weights, gradients and "
        "optimizer states where the configuration says, and shows what a step waits for and which bytes it moves.",
    )
    parser.add_argument(
        "directory",
        nargs="?",
        default="offloadzero-demo",
        metavar="DIR",
        help="for the states' files, which are removed, and the run's record, which stays (default offloadzero-demo)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a configuration (default: all states in files of DIR)"
    )
    parser.add_argument("--model", default="tiny", metavar="SIZE", help="tiny (default), 160m, 400m, 1b, ...")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="default: as many as there are in half a minute"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status. Raises OffloadError."""
    from offloadzero.cli.demo.gpt_model import SIZES, Text

    if args.model not in SIZES:
        raise ConfigError("--model", args.model, ", ".join(SIZES), known_values=SIZES)
    if args.steps is not None and args.steps < 1:
        raise ConfigError("--steps", args.steps, "at least 1")
    directory = make_directory(args.directory)
    config = demo_config(directory, args.config)
    print_lines([*machine_lines(find_facts([str(directory)], None, with_rates=False)), ""])
    text = Text.load()
    engine = build(args.model, config)
    try:
        train(engine, text, args.steps)
    finally:
        engine.close()
    run_dir = Path(config["offloadzero"]["observe"]["run_dir"])
    records = read_steps(run_dir / STEPS_FILE).records
    print_lines(["", summary(records), "", *text_table(LANE_COLUMNS, lane_rows(records)), ""])
    config_file = args.config or directory / "config.json"
    following = {
        f"offloadzero report {run_dir}": "this run as a page",
        f"offloadzero plan --model llama:7b --micro-batch 1 --config {config_file}": "what a larger model takes here",
        f"offloadzero doctor {directory}": "what slows this machine down, and what mends it",
    }
    print_lines(["Next:", *(f"    {command}  # {what}" for command, what in following.items())])
    return 0


def make_directory(name: str) -> Path:
    directory = Path(name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("DIR", name, f"a directory that can be made ({error.strerror})") from error
    return directory


def demo_config(directory: Path, file: str | None) -> dict[str, Any]:
    """Return the configuration with this run's record in it; the demo's own is left in the directory for `plan`."""
    config = read_config_file(file or OWN_CONFIG)
    if file is None:
        for states in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][states]["nvme_path"] = str(directory)
        save_json(str(directory / "config.json"), config)
    own = config.get("offloadzero", {})
    run_dir = directory / time.strftime("run-%Y%m%d-%H%M%S")
    return {**config, "offloadzero": {**own, "observe": {**own.get("observe", {}), "run_dir": str(run_dir)}}}


def build(model_size: str, config: dict[str, Any]) -> Engine:
    """Build the model straight into its homes, and say what lies where."""
    import torch

    import offloadzero
    from offloadzero.cli.demo.gpt_model import GPT, SIZES, num_params

    size = SIZES[model_size]
    torch.manual_seed(0)
    with offloadzero.zero.Init(config_dict_or_path=config):
        model = GPT(size, seq_len=SEQ_LEN)
    engine, _, _, _ = offloadzero.initialize(model=model, config=config)
    print_lines(
        [
            f"A GPT of {num_params(size, seq_len=SEQ_LEN):,} parameters learns Python's own sources, byte by byte.",
            engine.memory_table(),
            "",
        ]
    )
    return engine


def train(engine: Engine, text: Text, num_steps: int | None) -> None:
    """Train for so many steps, or for TRAIN_S, with a line every few seconds, and evaluate."""
    import torch

    batch_size = engine.train_micro_batch_size_per_gpu() or 1
    num_micro_batches = engine.gradient_accumulation_steps()
    tokens_per_step = num_micro_batches * batch_size * SEQ_LEN
    generator = torch.Generator().manual_seed(0)
    start_s = line_s = time.perf_counter()
    step = line_step = 0
    is_last = False
    while not is_last:
        for _ in range(num_micro_batches):
            tokens, targets = text.batch(batch_size=batch_size, seq_len=SEQ_LEN, generator=generator)
            loss = engine(tokens.to(engine.device), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
        step += 1
        now_s = time.perf_counter()
        is_last = now_s - start_s >= TRAIN_S if num_steps is None else step == num_steps
        if is_last or now_s - line_s >= LINE_EVERY_S:
            # Reading a loss waits for the device, so it is done once per line and not once per step.
            value = float(loss.detach())
            now_s = time.perf_counter()
            tokens_per_s = (step - line_step) * tokens_per_step / (now_s - line_s)
            print_lines([f"step {step}: loss {value:.4f}, {tokens_per_s:,.0f} tokens/s"])
            line_s, line_step = now_s, step
    tokens_per_s = step * tokens_per_step / (time.perf_counter() - start_s)
    batches = text.validation_batches(
        batch_size=batch_size, seq_len=SEQ_LEN, num_batches=NUM_VALIDATION_BATCHES
    )
    engine.eval()
    with torch.no_grad():
        losses = [float(engine(*(part.to(engine.device) for part in batch))) for batch in batches]
    print_lines(
        [
            f"validation loss {sum(losses) / len(losses):.4f} nats/byte after {step} steps, "
            f"{tokens_per_s:,.0f} tokens/s"
        ]
    )
