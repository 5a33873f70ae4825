# The compiled module (csrc/cpu_adam/binding.cpp). Layouts, dtypes and instruction sets are the enum values of
# csrc/cpu_adam/cpu_adam.h; buffers are addresses.

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
    scalars: tuple[float, float, float, float, float, float, float, float, float, float, bool],
    /,
) -> None: ...
def sq_norm(dtype: int, grad: int, num_elements: int, isa: int, num_threads: int, /) -> float: ...
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
