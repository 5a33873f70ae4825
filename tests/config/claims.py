"""Who tries what the table of keys says of those that it takes and does nothing with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from offloadzero.config.keys import DEEPSPEED_KEYS, OWN_KEYS, Action

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "offloadzero"

Test = Callable[..., None]
tried: dict[str, list[str]] = {}


def claim(*notes: str) -> Callable[[Test], Test]:
    """Marks the test that tries these notes."""

    def mark(test: Test) -> Test:
        for note in notes:
            tried.setdefault(note, []).append(test.__name__)
        return test

    return mark


# Note -> the test that tries it, of another file.
TRIED_BY: Mapping[str, str] = {
    "rank 0 writes under its own; ranks that would load different ones load none": (
        "test_ranks_states.py::test_a_checkpoint_of_two_ranks_is_one_of_any_number"
    ),
    "an optimizer passed in is used or refused by its type": "test_bad_input.py::test_an_optimizer_that_is_not_built",
    'offloadzero.activation_checkpoints.tier, where that is absent: true is host. Refused without "offloadzero": '
    '{"activation_checkpoints": {}}: calls of deepspeed.checkpointing.checkpoint are not read here': (
        "test_config_values.py::test_deepspeeds_key_puts_inputs_on_the_host"
    ),
    "there is no sequence parallelism": "test_deepspeed_initialize.py::test_parallelism_is_refused",
    "there is no expert parallelism": "test_deepspeed_initialize.py::test_parallelism_is_refused",
    "there is no pipeline parallelism": "test_deepspeed_initialize.py::test_parallelism_is_refused",
    "there is no tensor parallelism": "test_deepspeed_initialize.py::test_parallelism_is_refused",
    "the placement is planned from the budgets, nothing is tuned by trial": (
        "test_auto_placement.py::test_budgets_hold_and_the_choice_is_the_same_each_time"
    ),
    "compile the model's blocks with torch.compile before wrapping": "test_streaming.py::test_compiled_blocks",
    "checkpoints are written by this package": (
        "test_checkpoint.py::test_files_are_what_the_safetensors_library_reads"
    ),
    "tensors are written as safetensors": "test_checkpoint.py::test_files_are_what_the_safetensors_library_reads",
    "a checkpoint holds the master weights": "test_checkpoint.py::test_resume_is_bitwise",
    "a checkpoint holds whole tensors, whatever the placement": "test_checkpoint.py::test_resume_is_bitwise",
    "there is one fused update": "test_update_pipeline.py::test_every_combination_of_tiers",
    "gradients are converted inside the fused update": "test_cpu_adam_kernels.py::test_step_against_fp64",
    "gradients are always checked (offloadzero.update.on_nonfinite)": (
        "test_nonfinite.py::test_bf16_stops_at_a_gradient_that_is_not_finite"
    ),
    "whole units are fetched ahead as far as the leases allow (offloadzero.budgets)": (
        "test_order_of_use.py::test_a_step_fetches_as_little_as_is_possible_and_waits_for_none"
    ),
    "what stays on the device follows from the recorded order of use (offloadzero.budgets.device)": (
        "test_order_of_use.py::test_a_step_fetches_as_little_as_is_possible_and_waits_for_none"
    ),
    "transfers always overlap the computation": (
        "test_order_of_use.py::test_a_step_fetches_as_little_as_is_possible_and_waits_for_none"
    ),
    "parameters leased on the device at once, at least a unit; a device budget wins": (
        "test_auto_placement.py::test_max_live_parameters_are_the_leases_where_no_budget_is"
    ),
    "units are cut by offloadzero.units": "test_units.py::test_patterns_replace_the_default_cut",
    "the flat layout aligns what needs it": "test_units.py::test_record_layout",
    "offloadzero.poison_released_leases and offloadzero.aio.checksums are the checks there are": (
        "test_races.py::test_poison_is_what_a_released_lease_holds"
    ),
    "leases are sized from the units and the budgets (offloadzero.budgets)": (
        "test_memory_plan.py::test_unit_leases_take_what_the_device_budget_leaves"
    ),
    "the host tier's share is offloadzero.budgets.host": "test_bad_input.py::test_a_budget_that_is_too_small",
    "the update overlaps backward or the next forward, and is exact": "test_parity.py::test_matrix",
    "the update's threads are offloadzero.update.num_threads": (
        "test_update_pipeline.py::test_threads_keep_to_the_cores_they_are_given"
    ),
    "submission and completion always overlap": "test_aio_faults.py::test_a_delayed_block_stalls_no_other",
    "the model, or offloadzero.activation_checkpoints.units, says where checkpoints are": (
        "test_activations.py::test_units_are_chosen_by_name"
    ),
}
# What no run of ours shows, and where it can be read.
READ_IN: Mapping[str, str] = {
    "in DeepSpeed it only warns of an unaligned size": "deepspeed/runtime/config.py, 0.19.8",
    "use torch.profiler": "advice",
    "requests are submitted in batches": "csrc/aio/worker.cpp: fill() stages them, serve() submits them",
}


def accepted() -> dict[str, str]:
    """Note -> one of its keys."""
    tables = (*DEEPSPEED_KEYS.items(), *OWN_KEYS.items())
    return {
        spec.note: f"{path}.{key}"
        for path, table in tables
        for key, spec in table.items()
        if spec.action in (Action.ACCEPT, Action.MAP)
    }


ABSENT_ELSEWHERE = {
    "gradient_clipping": "test_config_auto.py::test_initialize_clips_as_deepspeed_does_and_says_so",
    "offloadzero.placement_tokens": (
        "test_fastest_placement.py::test_an_engine_goes_by_what_was_measured_and_trains_the_same"
    ),
    **{
        f"offloadzero.placement{form}.{segment}": test
        for form in ("", "[]")
        for segment, test in (
            ("scales", "test_compact_engine.py::test_the_scales_live_with_the_first_moment_unless_placed"),
            ("grad", "test_memory_plan.py::test_gradients_move_to_nvme_when_the_host_is_too_small"),
        )
    },
}
