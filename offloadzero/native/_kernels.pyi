# The compiled module (csrc/cpu_adam/binding.cpp). Layouts, dtypes and instruction sets are the enum values of
# csrc/cpu_adam/cpu_adam.h; buffers are addresses.

_Scalars = tuple[float, float, float, float, float, float, float, float, float, float, float, float, bool]
_Compact = tuple[int, int, int, int, int]  # param, remainder, exp_avg, exp_avg_sq, scales
_State = tuple[int, int, int]  # master, exp_avg, exp_avg_sq

def isa_supported(isa: int, /) -> bool: ...
def adam_step(
    layout: int,
    grad_dtype: int,
    param: int,
    master: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    num_elements: int,
    isa: int,
    num_threads: int,
    scalars: _Scalars,
    /,
) -> None: ...
def lion_step(
    layout: int,
    grad_dtype: int,
    param: int,
    master: int,
    exp_avg: int,
    grad: int,
    num_elements: int,
    isa: int,
    num_threads: int,
    scalars: _Scalars,
    /,
) -> None: ...
def adagrad_step(
    layout: int,
    grad_dtype: int,
    param: int,
    master: int,
    square_sum: int,
    grad: int,
    num_elements: int,
    isa: int,
    num_threads: int,
    scalars: _Scalars,
    /,
) -> None: ...
def sgd_step(
    layout: int,
    grad_dtype: int,
    param: int,
    master: int,
    momentum_buffer: int,
    grad: int,
    num_elements: int,
    isa: int,
    num_threads: int,
    scalars: _Scalars,
    /,
) -> None: ...
def compact_adam_step(
    grad_dtype: int,
    compact: _Compact,
    grad: int,
    num_elements: int,
    isa: int,
    num_threads: int,
    scalars: _Scalars,
    step: int,
    /,
) -> None: ...
def compact_encode(
    state: _State, compact: _Compact, num_elements: int, isa: int, num_threads: int, /
) -> None: ...
def compact_decode(
    compact: _Compact, state: _State, num_elements: int, isa: int, num_threads: int, /
) -> None: ...
def stream(
    arrays: tuple[tuple[int, int], ...],
    num_written: int,
    prefetch: bool,
    num_elements: int,
    isa: int,
    num_threads: int,
    /,
) -> int: ...
def sq_norm(dtype: int, grad: int, num_elements: int, isa: int, num_threads: int, /) -> float: ...
def sq_norms(
    dtype: int,
    grad: int,
    num_elements: int,
    parts: tuple[tuple[int, int], ...],
    isa: int,
    num_threads: int,
    /,
) -> tuple[float, ...]: ...
def accumulate(
    acc_dtype: int, grad_dtype: int, acc: int, grad: int, num_elements: int, isa: int, num_threads: int, /
) -> None: ...
def split_master(
    master: int, param: int, remainder: int, num_elements: int, isa: int, num_threads: int, /
) -> None: ...
def join_master(
    param: int, remainder: int, master: int, num_elements: int, isa: int, num_threads: int, /
) -> None: ...
def copy_bytes(dst: int, src: int, num_bytes: int, num_threads: int, /) -> None: ...
def split_join_exhaustive(isa: int, num_threads: int, /) -> int: ...
def set_cores(mask: bytes) -> None: ...
