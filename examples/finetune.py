"""Fine-tune a Hugging Face model on text or on a JSONL file, all of it or adapters (LoRA), whatever fits where.

python examples/finetune.py --model DIR --data FILE --output DIR [--lora 16] [--config FILE]
torchrun --nproc-per-node 2 examples/finetune.py --model DIR --data FILE --output DIR

--model is a folder that `from_pretrained` loads. A line of a JSONL file has "text", "prompt" and "completion" (the
completion alone is trained on), or "messages" for the tokenizer's chat template; any other file, and all files of a
folder, are text. Without --config states go where they fit: device, host memory, then files in --offload-files. Before
anything is built the script shows what `offloadzero plan` says of it, bytes and seconds, and stops if it does not fit.
Ctrl-C saves after the running step, and the same command goes on from there. At the end --output holds a folder that
`from_pretrained` loads; with --lora the adapters, which PEFT loads.

The loss is the mean over the tokens that are trained on: over those of a whole step, and of all held-out blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

import offloadzero

IGNORED = -100  # a label that the losses of transformers leave out
INTERRUPTED = 130
MASKED_SHARE = 0.15
TEXTS = ("text", "prompt", "completion")
DEFAULT_LR = 1e-5
RATES = {"lr", "muon_lr", "adam_lr"}  # of an optimizer in --config
LINE_STEPS = 10  # a line each so many, where there is no terminal for a bar
HELD_OUT = 20  # one of so many blocks is for evaluation


def main(given: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 where something was refused or failed, 130 after Ctrl-C."""
    args = parse_arguments(given)
    try:
        return finetune(args)
    except (offloadzero.OffloadError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped: the same command goes on from the last checkpoint, if there is one", file=sys.stderr)
        return INTERRUPTED


def finetune(args: argparse.Namespace) -> int:
    if not (args.model / "config.json").is_file():
        raise ValueError(f"--model {args.model}: no folder of a model, it has no config.json")
    if args.output.resolve() == args.model.resolve():
        raise ValueError(f"--output {args.output}: is the folder of --model, which would be overwritten")
    args.lr = learning_rate(args)
    config = str(args.config) if args.config else default_config(args)
    # Rank 0 before it joins the others: they wait for it in init_distributed(), and their launcher ends them with it.
    if not args.no_plan and os.environ.get("RANK", "0") == "0":
        show_plan(args, config)
    offloadzero.init_distributed()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    blocks = Blocks(args.data, tokenizer, args.seq_len)
    engine = build(args, config, blocks)
    try:
        with without_cache(engine.module.config):
            is_interrupted = train(engine, blocks, args)
        if not is_interrupted:
            save(engine, tokenizer, args)
    finally:
        engine.close()
    return INTERRUPTED if is_interrupted else 0


def learning_rate(args: argparse.Namespace) -> float | None:
    """The rate of --lr; else None where --config has rates, which must have an optimizer, else the default."""
    config: Any = {"optimizer": {}}
    if args.config:
        with suppress(ValueError):  # the library says what is wrong with it
            config = json.loads(args.config.read_text())
    if isinstance(config, dict) and "optimizer" not in config:
        raise ValueError(f'--config {args.config}: it has no "optimizer", such as {{"type": "AdamW"}}')
    given = config["optimizer"].get("params", {}) if isinstance(config, dict) else {}
    return args.lr or (None if given.keys() & RATES else DEFAULT_LR)


def default_config(args: argparse.Namespace) -> dict[str, Any]:
    """bf16, AdamW, clipping, recomputed activations; states wherever the memory that is free allows."""
    files = {"device": "nvme", "nvme_path": str(args.offload_files or args.output / "offload-files")}
    Path(files["nvme_path"]).mkdir(parents=True, exist_ok=True)
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.95], "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3, "offload_param": files, "offload_optimizer": files},
        "offloadzero": {
            "placement": "auto",
            "placement_tokens": args.micro_batch * args.seq_len,
            "activation_checkpoints": {},
        },
    }


def show_plan(args: argparse.Namespace, config: dict[str, Any] | str) -> None:
    """Show what each tier will hold and how long a step takes. Raises ValueError if it does not fit."""
    if not isinstance(config, str):
        path = args.output / "offloadzero.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config, indent=1))
        config = str(path)
    command = [sys.executable, "-m", "offloadzero", "plan", "--model", str(args.model), "--config", config]
    command += ["--sequence", str(args.seq_len)]
    if args.lora:
        command += ["--lora", str(args.lora)]
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if num_ranks != "1":  # how fast they send to each other is not measured
        command += ["--ranks", num_ranks, "--local-ranks", os.environ.get("LOCAL_WORLD_SIZE", num_ranks)]
        command += ["--no-time"]
    print(f"$ {shlex.join(command)}", flush=True)
    if subprocess.run(command, check=False).returncode:
        raise ValueError("nothing was started: see the plan. --no-plan starts without asking it")


def build(args: argparse.Namespace, config: dict[str, Any] | str, blocks: Blocks) -> Any:
    """Load the model straight to the homes of its weights, put adapters on, and make the engine."""
    torch.manual_seed(args.seed)
    about = transformers.AutoConfig.from_pretrained(args.model)
    blocks.is_masked = is_masked_model(about)
    kind = transformers.AutoModelForMaskedLM if blocks.is_masked else transformers.AutoModelForCausalLM
    # A quantised model would be loaded onto the GPU, all of it.
    place = {"device_map": {"": "cpu"}} if getattr(about, "quantization_config", None) else {}
    with offloadzero.zero.Init(config_dict_or_path=config):
        model = kind.from_pretrained(args.model, dtype="auto", **place)
    largest, num_embeddings = blocks.largest_token, model.get_input_embeddings().weight.shape[0]
    if largest >= num_embeddings:  # on a GPU it would be an assertion of the device
        allowed = f"{num_embeddings} embeddings: resize_token_embeddings() and save_pretrained() before"
        raise ValueError(
            f"--model {args.model}: its tokenizer gives the token {largest}, and it has {allowed}"
        )
    if args.lora:
        import peft

        task = None if blocks.is_masked else "CAUSAL_LM"
        adapters = peft.LoraConfig(
            r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear", task_type=task
        )
        model = peft.get_peft_model(model, adapters)
    model.train()
    engine = offloadzero.initialize(model=model, config=config)[0]
    if args.no_plan and engine.global_rank == 0:
        print(engine.memory_table(), flush=True)
    return engine


def is_masked_model(about: Any) -> bool:
    """Whether its tokens see each other in both directions: what comes next is nothing that it could learn."""
    is_causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in about.architectures or ())
    return type(about) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not is_causal


class Blocks:
    """The data as blocks of `seq_len` tokens, each example after the other with the tokenizer's end between them."""

    def __init__(self, path: Path, tokenizer: Any, seq_len: int) -> None:
        self._tokenizer = tokenizer
        self.is_masked = False
        ids: list[int] = []
        labels: list[int] = []
        for tokens, first_trained in examples(path, tokenizer):
            ids += tokens
            labels += [IGNORED] * first_trained + tokens[first_trained:]
        num_blocks = len(ids) // seq_len
        shape = (num_blocks, seq_len)
        self._ids = torch.tensor(ids[: num_blocks * seq_len]).view(shape)
        self._labels = torch.tensor(labels[: num_blocks * seq_len]).view(shape)
        # The loss of a block without a token to train on is no number.
        is_trained = (self._labels[:, 1:] != IGNORED).any(1)
        self._ids, self._labels = self._ids[is_trained], self._labels[is_trained]
        num_blocks = len(self._ids)
        if num_blocks < 2:
            allowed = f"two blocks of --seq-len {seq_len} with tokens to train on at least"
            raise ValueError(f"{path}: {len(ids)} tokens, which make {num_blocks}; needed are {allowed}")
        is_held_out = torch.arange(num_blocks) % HELD_OUT == min(HELD_OUT, num_blocks) - 1
        self._train, self._held_out = (~is_held_out).nonzero()[:, 0], is_held_out.nonzero()[:, 0]

    def __len__(self) -> int:
        """The blocks that are trained on."""
        return len(self._train)

    @property
    def num_held_out(self) -> int:
        """The blocks of an evaluation."""
        return len(self._held_out)

    @property
    def largest_token(self) -> int:
        """The largest of all token ids."""
        return int(self._ids.max())

    def batch(self, first: int, size: int, seed: int) -> dict[str, Tensor]:
        """Blocks `first` to `first + size` of an endless row of epochs, each in an order of its own."""
        chosen = []
        for position in range(first, first + size):
            epoch, place = divmod(position, len(self))
            order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed + epoch))
            chosen.append(self._train[order[place]])
        return self._inputs(torch.stack(chosen), seed + first)

    def held_out(self, size: int, rank: int, world_size: int) -> Iterator[tuple[dict[str, Tensor], int]]:
        """A rank's batches of the held-out blocks, and their tokens. All ranks have as many: the last may count 0."""
        batches = self._held_out.split(size)
        for first in range(0, len(batches), world_size):
            index = first + rank
            batch = self._inputs(batches[index % len(batches)], index)
            yield batch, self.num_trained(batch) if index < len(batches) else 0

    def num_trained(self, batch: dict[str, Tensor]) -> int:
        """The tokens that its loss is the mean over: a causal model has none for the first of a block."""
        labels = batch["labels"] if self.is_masked else batch["labels"][:, 1:]
        return int((labels != IGNORED).sum())

    def _inputs(self, chosen: Tensor, seed: int) -> dict[str, Tensor]:
        ids, labels = self._ids[chosen], self._labels[chosen]
        if self.is_masked:
            drawn = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed))
            drawn[labels == IGNORED] = 1.0
            is_masked = (drawn < MASKED_SHARE) | (drawn == drawn.amin(1, keepdim=True))  # one at least
            labels = labels.masked_fill(~is_masked, IGNORED)
            ids = ids.masked_fill(is_masked, self._tokenizer.mask_token_id)
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def examples(path: Path, tokenizer: Any) -> Iterator[tuple[list[int], int]]:
    """The tokens of each example, and the number of the first that is trained on."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    end_ids = [] if end is None else [end]

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    if not path.exists():
        raise ValueError(f"--data {path}: does not exist")
    if path.suffix != ".jsonl":
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                yield encode(file.read_text(errors="replace")) + end_ids, 0
        return
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        if not isinstance(row, dict) or not all(isinstance(row.get(key, ""), str) for key in TEXTS):
            raise ValueError(f"{path}:{number}: no JSON object whose {', '.join(TEXTS)} are text")
        if "messages" in row:
            yield encode(tokenizer.apply_chat_template(row["messages"], tokenize=False)) + end_ids, 0
        elif "prompt" in row and "completion" in row:
            prompt = encode(row["prompt"])
            yield prompt + encode(row["completion"]) + end_ids, len(prompt)
        elif "text" in row:
            yield encode(row["text"]) + end_ids, 0
        else:
            allowed = '"text", "prompt" and "completion", or "messages"'
            raise ValueError(f"{path}:{number}: has {', '.join(row)}, and not {allowed}")


def train(engine: Any, blocks: Blocks, args: argparse.Namespace) -> bool:
    """Train up to the last step, from a checkpoint where there is one. True if Ctrl-C ended it: all is saved then."""
    checkpoints = args.output / "checkpoints"
    started = {name: getattr(args, name) for name in ("seq_len", "seed", "lora")} | {"blocks": len(blocks)}
    rates = [args.lr or group["lr"] for group in engine.optimizer.param_groups]
    loaded, state = engine.load_checkpoint(str(checkpoints))
    if state.get("started", started) != started:
        raise ValueError(f"--output {args.output}: was begun with {state['started']}, and not {started}")
    if loaded is not None and engine.global_rank == 0:
        print(f"going on from step {engine.global_steps}", flush=True)
    size, num_micro_batches = (
        engine.train_micro_batch_size_per_gpu() or 1,
        engine.gradient_accumulation_steps(),
    )
    # Of a run that goes on with another batch or number of ranks: it goes on at the block that is next.
    num_blocks = state.get("num_blocks", 0)
    of_step = size * num_micro_batches * engine.world_size
    left = -(-(len(blocks) * args.epochs - num_blocks) // of_step)
    num_steps = args.steps or engine.global_steps + max(0, left)
    is_first = engine.global_rank == 0
    is_shown = is_first and sys.stderr.isatty()
    bar = tqdm(total=num_steps, initial=engine.global_steps, unit="step", disable=not is_shown)
    with stopping_after_step() as is_asked, bar:
        while engine.global_steps < num_steps:
            set_rate(engine, rates, num_steps)
            # Dropout draws the same in a run that was interrupted.
            torch.manual_seed(args.seed + engine.global_steps * engine.world_size + engine.global_rank)
            position = num_blocks + engine.global_rank * size
            firsts = [position + micro * size * engine.world_size for micro in range(num_micro_batches)]
            window = [blocks.batch(first, size, args.seed) for first in firsts]
            num_trained = [blocks.num_trained(batch) for batch in window]
            (num_of_step,) = over_ranks(engine, sum(num_trained))
            total = torch.zeros((), device=engine.device)
            for batch, count in zip(window, num_trained, strict=True):
                total += backward(engine, batch, count / num_of_step)
            num_blocks += of_step
            mean_loss, num_asked = over_ranks(engine, total, is_asked())
            loss = f"loss {mean_loss:.4f}"
            bar.set_postfix_str(loss, refresh=False)
            bar.update()
            if is_first and not is_shown and engine.global_steps % LINE_STEPS == 0:
                print(f"step {engine.global_steps}/{num_steps}: {loss}", flush=True)
            is_last = engine.global_steps == num_steps
            if is_last or num_asked or engine.global_steps % args.save_every == 0:
                state = {"started": started, "num_blocks": num_blocks}
                engine.save_checkpoint(
                    str(checkpoints),
                    tag="last",
                    client_state=state,
                    exclude_frozen_parameters=bool(args.lora),
                )
            if is_last or (args.eval_every and engine.global_steps % args.eval_every == 0):
                if is_first and not is_shown:
                    print(f"evaluation: {blocks.num_held_out} blocks", flush=True)
                held_out = evaluate(engine, blocks, size)
                if is_first:
                    tqdm.write(f"step {engine.global_steps}/{num_steps}: evaluation loss {held_out:.4f}")
            if num_asked and not is_last:
                if is_first:
                    tqdm.write(
                        f"stopped after step {engine.global_steps}: the same command goes on from there"
                    )
                return True
    return False


def backward(engine: Any, batch: dict[str, Tensor], share: float) -> Tensor:
    """Train on a micro batch with that share of the tokens of its step, and return its part of the step's loss."""
    loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss
    # The engine's gradient is the mean over micro batches and ranks, which is that over tokens if all have as many.
    engine.backward(loss * (share * engine.gradient_accumulation_steps() * engine.world_size))
    engine.step()
    return loss.detach() * share


def set_rate(engine: Any, rates: Sequence[float], num_steps: int) -> None:
    """A linear warm-up over a thirtieth of the steps, then down to a tenth."""
    done, warm_up = engine.global_steps, max(1, num_steps // 30)
    factor = min((done + 1) / warm_up, 1 - 0.9 * done / num_steps)
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor


@torch.no_grad()
def evaluate(engine: Any, blocks: Blocks, size: int) -> float:
    """The mean loss of the tokens of all held-out blocks."""
    engine.eval()
    total, num_tokens = torch.zeros((), device=engine.device), 0
    batches = blocks.held_out(size, engine.global_rank, engine.world_size)
    is_hidden = None if engine.global_rank == 0 else True  # None: where there is no terminal
    for batch, count in tqdm(batches, "evaluation", unit="batch", leave=False, disable=is_hidden):
        total += engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss * count
        num_tokens += count
    engine.train()
    sum_of_losses, num_of_all = over_ranks(engine, total, num_tokens)
    return sum_of_losses / num_of_all


def over_ranks(engine: Any, *values: Tensor | float) -> list[float]:
    """The sum of each value over the ranks."""
    sums = torch.stack(
        [torch.as_tensor(value, dtype=torch.float64, device=engine.device) for value in values]
    )
    if engine.world_size > 1:
        torch.distributed.all_reduce(sums)
    return sums.tolist()


def save(engine: Any, tokenizer: Any, args: argparse.Namespace) -> None:
    """Write what `from_pretrained` loads; the weights go one by one, so that they need no memory."""
    model = engine.module
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    if args.lora:
        adapters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        if engine.global_rank == 0:
            model.save_pretrained(args.output, state_dict=adapters)
    else:
        engine.save_16bit_model(args.output)
        if engine.global_rank == 0:
            model.config.dtype = next(model.parameters()).dtype
            model.config.save_pretrained(args.output)
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(args.output)
    if engine.global_rank == 0:
        tokenizer.save_pretrained(args.output)
        what = "adapters" if args.lora else "weights"
        print(f"saved to {args.output}: {what} in {', '.join(sorted(dtypes))}")


@contextmanager
def without_cache(config: Any) -> Iterator[None]:
    """The model keeps no keys and values, which activations that are computed again would extend once more."""
    keeps = getattr(config, "use_cache", False)
    if keeps:
        config.use_cache = False
    try:
        yield
    finally:
        if keeps:
            config.use_cache = True


@contextmanager
def stopping_after_step() -> Iterator[Any]:
    """Ctrl-C is noted once, and raised the second time."""
    asked = False

    def note(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            signal.default_int_handler(number, frame)
        asked = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def count(text: str) -> int:
    """An integer of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder that from_pretrained loads")
    parser.add_argument("--data", type=Path, required=True, help="JSONL, text, or a folder of text files")
    parser.add_argument("--output", type=Path, required=True, help="folder that is written")
    parser.add_argument("--lora", type=count, metavar="RANK", help="train adapters of this rank alone")
    parser.add_argument("--config", type=Path, help="JSON configuration (DeepSpeed's keys)")
    parser.add_argument(
        "--offload-files", type=Path, help="folder on an NVMe drive for what memory cannot hold"
    )
    parser.add_argument("--no-plan", action="store_true", help="start without asking `offloadzero plan`")
    parser.add_argument("--epochs", type=count, default=1)
    parser.add_argument("--steps", type=count, help="in the place of --epochs")
    parser.add_argument("--micro-batch", type=count, default=1, help="blocks per rank at a time")
    parser.add_argument("--accumulation", type=count, default=8, help="micro batches per step")
    parser.add_argument("--seq-len", type=count, default=1024)
    parser.add_argument("--lr", type=float, help=f"that of --config, else {DEFAULT_LR:g}, when absent")
    parser.add_argument("--eval-every", type=count, default=100, metavar="STEPS")
    parser.add_argument("--save-every", type=count, default=500, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
