"""`offloadzero plan`: the bytes per tier, whether they fit, and the time of a step, before anything runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloadzero.cli.output import check_output, make_page, print_lines, save_json, save_text, show_result
from offloadzero.config import OffloadConfig, load_config, read_config_file
from offloadzero.config.readers import read_num_bytes
from offloadzero.errors import ConfigError
from offloadzero.ranks.shard import MAX_RANKS

if TYPE_CHECKING:  # else it loads torch for `--help`
    from offloadzero.planning.cluster import Cluster

FORMAT = "offloadzero.plan"
FORMAT_VERSION = 1
THIS_MACHINE = "probe"
# Machines that are described here by published rates; benchmarks/hardware/README.md has the source of each.
MACHINES = {path.stem: str(path) for path in sorted((Path(__file__).parent / "machines").glob("*.json"))}
DEFAULT_SEQUENCE = 2048
MAX_TOKENS = 10**18
MAX_ADAPTER_RANK = 1 << 14
_COUNT_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="what a model needs and how long a step takes, before it runs",
        description="Plans a model as the engine would, without building it: bytes per tier and segment, whether "
        "they fit this machine, the smallest change with which they would, and the step time to expect.",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="SPEC",
        help="llama:13b, gpt:10b, hidden/layers/heads/vocabulary[/intermediate[/kv heads]], the config.json of a model "
        "of transformers, or module:function",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the configuration, as for training")
    parser.add_argument(
        "--hardware",
        default=THIS_MACHINE,
        metavar="probe|NAME|FILE",
        help=f"this machine (measured once, in a minute or two), one of {', '.join(MACHINES)} as published rates have "
        'it, or a file: one of --hardware-out, or the description of a cluster (the page "What the plan counts")',
    )
    parser.add_argument(
        "--hardware-out", metavar="FILE", help="write the machine to this file, to be edited for --hardware"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again")
    parser.add_argument("--no-time", action="store_true", help="bytes only: measure nothing")
    parser.add_argument("--micro-batch", type=int, metavar="B", help="in the place of the configuration's")
    parser.add_argument(
        "--sequence",
        type=int,
        metavar="T",
        help="tokens per sample (default 2048, or all positions of a model with fewer)",
    )
    parser.add_argument(
        "--lora",
        type=int,
        metavar="RANK",
        help="with the model's weights frozen, and adapters of this rank on all linear layers but the head",
    )
    parser.add_argument(
        "--loop", choices=("initialize", "offload"), default="initialize", help="how the script starts"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="the plan of one of N ranks, and its bytes by ZeRO's stage (default 1, of a cluster all devices)",
    )
    parser.add_argument(
        "--local-ranks",
        type=int,
        metavar="M",
        help="of the ranks, those that share a machine's memory, drives and cores (default 1; a cluster says it)",
    )
    parser.add_argument("--tokens", metavar="N", help="days and drive writes for so many tokens: 300b, 1.4t")
    parser.add_argument(
        "--drive-tbw", metavar="SIZE", help="what the drives together are made to take: 600TB"
    )
    parser.add_argument(
        "--largest", action="store_true", help="with more or fewer blocks of that shape: the most that fit"
    )
    parser.add_argument("--json", metavar="FILE", help="everything, - for standard output")
    parser.add_argument("--html", metavar="FILE", help="the answer as a page that loads nothing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status: 0, or 1 if the model does not fit. Raises OffloadError."""
    from offloadzero.cli.plan import measure
    from offloadzero.cli.plan import report as reports
    from offloadzero.cli.plan.answer import largest_model, of_largest
    from offloadzero.planning.cluster import find_cluster
    from offloadzero.update.spec import DTYPES

    args.hardware = machine_file(args.hardware)
    cluster = None if args.hardware == THIS_MACHINE else find_cluster("--hardware", args.hardware)
    _check(args, cluster)
    load = partial(load_config, world_size=args.ranks, elsewhere=args.hardware != THIS_MACHINE)
    load(args.config)  # checks it as a training does
    source = read_config_file(args.config)
    if args.micro_batch is not None:
        source = with_micro_batch(source, args.micro_batch, load)
    config = load(source)
    question, hardware = ask(args, config, cluster)
    if args.largest:
        question = replace(question, model=largest_model(question, source))
    if args.hardware == THIS_MACHINE and args.ranks == 1 and not args.no_time:
        hardware = measure.with_model(
            hardware,
            config.device,
            question.model,
            dtype=DTYPES[config.precision.param_dtype],
            micro_batch=config.batch.micro_batch_size or 1,
            sequence=question.sequence,
            fresh=args.fresh,
        )
        question = replace(question, hardware=hardware)
    report = reports.make_report(
        question,
        source,
        hardware,
        cluster=cluster,
        with_time=not args.no_time,
        num_tokens=args.tokens,
        endurance_bytes=args.drive_tbw,
        show=None if args.json == "-" else print_lines,
    )
    result = {"format": FORMAT, "format_version": FORMAT_VERSION, **report.to_json()}
    lines = report.answer_lines()
    if args.largest:
        lines += ["", of_largest(question, source)]
    show_result(lines, args.json, result)
    if args.html:
        save_text(args.html, make_page(reports.PAGE, reports.plan_data(report)))
        if args.json != "-":
            print_lines(["", f"written to {args.html}"])
    if args.hardware_out:
        save_json(args.hardware_out, hardware.to_json() if cluster is None else cluster.described)
    return 0 if report.fits else 1


def machine_file(given: str) -> str:
    """Return the file that `--hardware` names, or THIS_MACHINE. Raises ConfigError."""
    if given == THIS_MACHINE or os.path.exists(given):
        return given
    if given not in MACHINES:
        names = (THIS_MACHINE, *MACHINES)
        raise ConfigError("--hardware", given, f"a file, or one of {', '.join(names)}", known_values=names)
    return MACHINES[given]


def _check(args: argparse.Namespace, cluster: Cluster | None) -> None:
    """Raise ConfigError for arguments that cannot be, fill in the number of ranks, and read the texts of numbers."""
    if args.ranks is None:
        args.ranks = 1 if cluster is None else cluster.num_gpus
    of_machine = 1
    if cluster is not None:
        of_machine = cluster.local_ranks("--ranks", args.ranks) if 1 <= args.ranks <= MAX_RANKS else 1
        if args.local_ranks not in (None, of_machine):
            raise ConfigError("--local-ranks", args.local_ranks, f"{of_machine}, as the cluster says")
    if args.local_ranks is None:
        args.local_ranks = of_machine
    for key, value, most in (
        ("--micro-batch", args.micro_batch, 1 << 20),
        ("--sequence", args.sequence, 1 << 24),
        ("--ranks", args.ranks, MAX_RANKS),
        ("--local-ranks", args.local_ranks, args.ranks),
        ("--lora", args.lora, MAX_ADAPTER_RANK),
    ):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(key, value, f"a whole number from 1 to {most:,}")
    _check_outputs(args)
    if args.no_time and args.hardware_out:
        raise ConfigError(
            "--hardware-out", args.hardware_out, "left out with --no-time, which measures nothing"
        )
    if args.no_time and args.tokens:
        raise ConfigError("--tokens", args.tokens, "left out with --no-time, which counts no step")
    if args.drive_tbw and not args.tokens:
        raise ConfigError("--drive-tbw", args.drive_tbw, "together with --tokens: it is said of a run")
    # The machine is measured for a minute after this: what is misspelled is said before.
    args.tokens = read_count("--tokens", args.tokens)
    if args.drive_tbw is not None:
        given, args.drive_tbw = args.drive_tbw, read_num_bytes("--drive-tbw", args.drive_tbw)
        if args.drive_tbw == 0:
            raise ConfigError("--drive-tbw", given, "more than nothing")


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise ConfigError when a result could not be written, or would replace what is read or another result.

    `--hardware-out` may name the file of `--hardware`: what is read of a machine is written again.
    """
    outputs = {"--json": None if args.json == "-" else args.json, "--html": args.html}
    taken = {"--config": args.config, "--model": args.model, "--hardware": args.hardware}
    for key, path in ("--hardware-out", args.hardware_out), *outputs.items():
        check_output(key, path)
        if path is None or (os.path.exists(path) and not os.path.isfile(path)):  # /dev/null may take two
            continue
        for other, found in taken.items():
            is_same = found is not None and os.path.realpath(found) == os.path.realpath(path)
            if is_same and (other, key) != ("--hardware", "--hardware-out"):
                raise ConfigError(key, path, f"another file than that of {other}")
        taken[key] = path


def read_count(key: str, text: str | None) -> int | None:
    """Read "300b", "1.4t" or "5000000". Raises ConfigError."""
    if text is None:
        return None
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].lower() in _COUNT_UNITS else (text, "")
    try:
        count = float(number) * _COUNT_UNITS.get(unit, 1)
    except ValueError:
        count = 0.0
    if not 1 <= count <= MAX_TOKENS:
        raise ConfigError(key, text, "a number of tokens such as 300b or 1.4t")
    return int(count)


def with_micro_batch(
    source: Mapping[str, Any], micro_batch: int, load: Callable[[Mapping[str, Any]], OffloadConfig]
) -> dict[str, Any]:
    """Return the configuration with another micro batch, and with as many of them in a step as it had."""
    num_micro = load(source).batch.gradient_accumulation_steps
    return {
        **source,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": num_micro,
        "train_batch_size": None,
    }


def ask(args: argparse.Namespace, config: OffloadConfig, cluster: Cluster | None) -> tuple[Any, Any]:
    """Return the question, and what a rank has of the machine that it is about; the memory is the machine's.

    Raises ConfigError for a sequence beyond the model's positions, and where the machine's description leaves out the
    drives that the configuration names.
    """
    from offloadzero.cli.plan import measure
    from offloadzero.cli.plan.answer import Question, in_memory
    from offloadzero.engine.planned_model import Loop
    from offloadzero.planning.cluster import FORMAT as CLUSTER_FORMAT
    from offloadzero.planning.hardware import Memory, drive_bytes, read_hardware
    from offloadzero.planning.model.shapes import read_model

    model = replace(read_model(args.model), adapter_rank=args.lora or 0)
    if model.shape is None:  # a mistake in it is said before a minute of measurement
        params = list(model.on_meta().parameters())
        if params and not any(param.requires_grad for param in params):
            allowed = "a model with something to train: its weights are frozen, and --lora RANK adds adapters"
            raise ConfigError("--model", args.model, allowed)
    most = model.num_positions
    sequence = args.sequence or (min(DEFAULT_SEQUENCE, most) if most else DEFAULT_SEQUENCE)
    if most and sequence > most and model.learns_positions:
        raise ConfigError("--sequence", sequence, f"at most {most:,}, the positions of {args.model}")
    if cluster is not None:
        hardware = replace(cluster.rank(args.local_ranks), process_bytes=measure.resident_bytes())
    elif args.hardware != THIS_MACHINE:
        hardware = read_hardware(args.hardware, other=f", nor a cluster (format {CLUSTER_FORMAT})")
        if config.nvme_paths and hardware.memory.nvme is None:
            paths = ", ".join(map(str, config.nvme_paths))
            allowed = f"the bytes of the drives under {paths}, which the configuration names; 0 where there are none"
            raise ConfigError("--hardware.memory.nvme", None, allowed)
    elif args.no_time:
        hardware = measure.without_measuring(config.device, config.nvme_paths)
    else:
        hardware = measure.this_hardware(config.device, config.nvme_paths, fresh=args.fresh)

    def memory_of(config: OffloadConfig) -> Memory:
        nvme = hardware.memory.nvme
        if not config.nvme_paths:
            nvme = None
        elif args.hardware == THIS_MACHINE:
            nvme = drive_bytes(config.nvme_paths)
        host = hardware.memory.host // args.local_ranks
        return replace(hardware.memory, host=host, nvme=None if nvme is None else nvme // args.local_ranks)

    question = Question(
        model=model,
        memory_of=memory_of,
        form_of=lambda spec: measure.form_on(hardware, spec),
        loop=Loop(args.loop),
        sequence=sequence,
        process_bytes=hardware.process_bytes,
        num_ranks=args.ranks,
        num_local_ranks=args.local_ranks,
        hardware=hardware,
        elsewhere=args.hardware != THIS_MACHINE,
        in_memory=in_memory if args.hardware == THIS_MACHINE else lambda _: (),
    )
    return question, hardware
