// The Python module: addresses and sizes as plain ints, limited API 3.10. The typed face that checks the
// tensors is offloadzero/native/cpu_adam.py; here only what would index out of a table is checked.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cerrno>

#include "cpu_adam.h"

namespace {

using namespace offloadzero::cpu_adam;
using Address = unsigned long long;

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

bool in_range(const char* name, int value, int count) {
    if (value >= 0 && value < count) return true;
    PyErr_Format(PyExc_ValueError, "%s = %d: allowed 0 to %d", name, value, count - 1);
    return false;
}

PyObject* result_of(int status) {
    if (status == 0) Py_RETURN_NONE;
    if (status == -ENOMEM) return PyErr_NoMemory();
    if (status == -ENOTSUP) {
        PyErr_SetString(PyExc_ValueError, "isa: this CPU or this build does not have it");
        return nullptr;
    }
    if (status == -EINVAL) {
        PyErr_SetString(PyExc_ValueError, "arguments that do not fit together");
        return nullptr;
    }
    PyErr_Format(PyExc_SystemError, "unexpected status %d", status);
    return nullptr;
}

// Runs `call` without the GIL and returns its status.
template <class Call>
int without_gil(const Call& call) {
    int status;
    Py_BEGIN_ALLOW_THREADS;
    status = call();
    Py_END_ALLOW_THREADS;
    return status;
}

PyObject* py_isa_supported(PyObject*, PyObject* args) {
    int isa;
    if (!PyArg_ParseTuple(args, "i:isa_supported", &isa)) return nullptr;
    if (!in_range("isa", isa, NUM_ISAS)) return nullptr;
    return PyBool_FromLong(isa_supported(static_cast<Isa>(isa)));
}

// The result of a step: None, or the squared norm where it was asked for.
PyObject* step_result(int status, bool with_sq_norm, double sq_norm) {
    return status == 0 && with_sq_norm ? PyFloat_FromDouble(sq_norm) : result_of(status);
}

// For PyArg_ParseTuple's "O&".
int read_scalars(PyObject* tuple, void* result) {
    auto* s = static_cast<AdamScalars*>(result);
    int decoupled;
    if (!PyArg_ParseTuple(tuple, "ffffffffffffp:scalars", &s->grad_scale, &s->beta1, &s->one_minus_beta1,
                          &s->beta2, &s->one_minus_beta2, &s->eps, &s->step_size,
                          &s->inv_sqrt_bias_correction2, &s->decay, &s->weight_decay, &s->sqrt_beta2,
                          &s->sqrt_one_minus_beta2, &decoupled)) {
        return 0;
    }
    s->decoupled = decoupled != 0;
    return 1;
}

PyObject* py_adam_step(PyObject*, PyObject* args) {
    int layout, grad_dtype, isa, num_threads, with_sq_norm;
    Address param, master, exp_avg, exp_avg_sq, grad;
    Py_ssize_t num_elements;
    AdamScalars scalars;
    if (!PyArg_ParseTuple(args, "iiKKKKKniiO&p:adam_step", &layout, &grad_dtype, &param, &master, &exp_avg,
                          &exp_avg_sq, &grad, &num_elements, &isa, &num_threads, read_scalars, &scalars,
                          &with_sq_norm) ||
        !in_range("layout", layout, NUM_LAYOUTS) || !in_range("grad_dtype", grad_dtype, NUM_DTYPES) ||
        !in_range("isa", isa, NUM_ISAS)) {
        return nullptr;
    }
    const AdamBuffers buffers{pointer<void>(param), pointer<void>(master), pointer<float>(exp_avg),
                              pointer<float>(exp_avg_sq), pointer<const void>(grad)};
    double sq_norm = 0.0;
    const int status = without_gil([&] {
        return adam_step(buffers, static_cast<Layout>(layout), static_cast<DType>(grad_dtype), scalars,
                         static_cast<size_t>(num_elements), static_cast<Isa>(isa), num_threads,
                         with_sq_norm ? &sq_norm : nullptr);
    });
    return step_result(status, with_sq_norm, sq_norm);
}

using MomentStep = int (*)(const MomentBuffers&, Layout, DType, const AdamScalars&, size_t, Isa, int,
                           double*);

PyObject* moment_step(MomentStep step, PyObject* args) {
    int layout, grad_dtype, isa, num_threads, with_sq_norm;
    Address param, master, moment, grad;
    Py_ssize_t num_elements;
    AdamScalars scalars;
    if (!PyArg_ParseTuple(args, "iiKKKKniiO&p", &layout, &grad_dtype, &param, &master, &moment, &grad,
                          &num_elements, &isa, &num_threads, read_scalars, &scalars, &with_sq_norm) ||
        !in_range("layout", layout, NUM_LAYOUTS) || !in_range("grad_dtype", grad_dtype, NUM_DTYPES) ||
        !in_range("isa", isa, NUM_ISAS)) {
        return nullptr;
    }
    const MomentBuffers buffers{pointer<void>(param), pointer<void>(master), pointer<float>(moment),
                                pointer<const void>(grad)};
    double sq_norm = 0.0;
    const int status = without_gil([&] {
        return step(buffers, static_cast<Layout>(layout), static_cast<DType>(grad_dtype), scalars,
                    static_cast<size_t>(num_elements), static_cast<Isa>(isa), num_threads,
                    with_sq_norm ? &sq_norm : nullptr);
    });
    return step_result(status, with_sq_norm, sq_norm);
}

PyObject* py_lion_step(PyObject*, PyObject* args) { return moment_step(lion_step, args); }
PyObject* py_adagrad_step(PyObject*, PyObject* args) { return moment_step(adagrad_step, args); }

// For "O&": (param, remainder, exp_avg, exp_avg_sq, scales).
int read_compact(PyObject* tuple, void* result) {
    Address param, remainder, exp_avg, exp_avg_sq, scales;
    if (!PyArg_ParseTuple(tuple, "KKKKK:compact", &param, &remainder, &exp_avg, &exp_avg_sq, &scales))
        return 0;
    *static_cast<CompactBuffers*>(result) = {pointer<uint16_t>(param), pointer<int8_t>(remainder),
                                             pointer<int8_t>(exp_avg), pointer<uint8_t>(exp_avg_sq),
                                             pointer<float>(scales),   nullptr};
    return 1;
}

// For "O&": (master, exp_avg, exp_avg_sq).
int read_fp32_state(PyObject* tuple, void* result) {
    Address master, exp_avg, exp_avg_sq;
    if (!PyArg_ParseTuple(tuple, "KKK:state", &master, &exp_avg, &exp_avg_sq)) return 0;
    *static_cast<Fp32State*>(result) = {pointer<float>(master), pointer<float>(exp_avg),
                                        pointer<float>(exp_avg_sq)};
    return 1;
}

PyObject* py_compact_adam_step(PyObject*, PyObject* args) {
    int grad_dtype, isa, num_threads, with_sq_norm;
    Address grad;
    Py_ssize_t num_elements;
    CompactBuffers buffers;
    AdamScalars scalars;
    unsigned int step;  // "I" takes it modulo 2^32
    if (!PyArg_ParseTuple(args, "iO&KniiO&Ip:compact_adam_step", &grad_dtype, read_compact, &buffers, &grad,
                          &num_elements, &isa, &num_threads, read_scalars, &scalars, &step, &with_sq_norm) ||
        !in_range("grad_dtype", grad_dtype, NUM_DTYPES) || !in_range("isa", isa, NUM_ISAS)) {
        return nullptr;
    }
    buffers.grad = pointer<const void>(grad);
    double sq_norm = 0.0;
    const int status = without_gil([&] {
        return compact_adam_step(buffers, static_cast<DType>(grad_dtype), scalars, step,
                                 static_cast<size_t>(num_elements), static_cast<Isa>(isa), num_threads,
                                 with_sq_norm ? &sq_norm : nullptr);
    });
    return step_result(status, with_sq_norm, sq_norm);
}

PyObject* py_compact_encode(PyObject*, PyObject* args) {
    int isa, num_threads;
    Py_ssize_t num_elements;
    Fp32State state;
    CompactBuffers buffers;
    if (!PyArg_ParseTuple(args, "O&O&nii:compact_encode", read_fp32_state, &state, read_compact, &buffers,
                          &num_elements, &isa, &num_threads) ||
        !in_range("isa", isa, NUM_ISAS)) {
        return nullptr;
    }
    return result_of(without_gil([&] {
        return compact_encode(state, buffers, static_cast<size_t>(num_elements), static_cast<Isa>(isa),
                              num_threads);
    }));
}

PyObject* py_compact_decode(PyObject*, PyObject* args) {
    int isa, num_threads;
    Py_ssize_t num_elements;
    Fp32State state;
    CompactBuffers buffers;
    if (!PyArg_ParseTuple(args, "O&O&nii:compact_decode", read_compact, &buffers, read_fp32_state, &state,
                          &num_elements, &isa, &num_threads) ||
        !in_range("isa", isa, NUM_ISAS)) {
        return nullptr;
    }
    return result_of(without_gil([&] {
        return compact_decode(buffers, state, static_cast<size_t>(num_elements), static_cast<Isa>(isa),
                              num_threads);
    }));
}

PyObject* py_stream(PyObject*, PyObject* args) {
    PyObject* list;
    int num_written, prefetch, isa, num_threads;
    Py_ssize_t num_elements;
    if (!PyArg_ParseTuple(args, "O!ipnii:stream", &PyTuple_Type, &list, &num_written, &prefetch,
                          &num_elements, &isa, &num_threads) ||
        !in_range("isa", isa, NUM_ISAS)) {
        return nullptr;
    }
    const Py_ssize_t num_arrays = PyTuple_Size(list);
    if (!in_range("number of arrays", static_cast<int>(num_arrays), MAX_STREAM_ARRAYS + 1) ||
        !in_range("num_written", num_written, static_cast<int>(num_arrays) + 1)) {
        return nullptr;
    }
    StreamArrays arrays{};
    arrays.num_arrays = static_cast<size_t>(num_arrays);
    arrays.num_written = static_cast<size_t>(num_written);
    arrays.prefetch = prefetch != 0;
    for (Py_ssize_t k = 0; k < num_arrays; ++k) {
        Address address;
        Py_ssize_t element_size;
        if (!PyArg_ParseTuple(PyTuple_GetItem(list, k), "Kn:array", &address, &element_size)) return nullptr;
        arrays.address[k] = pointer<void>(address);
        arrays.element_size[k] = static_cast<size_t>(element_size);
    }
    uint64_t sink = 0;
    const int status = without_gil([&] {
        return stream(arrays, static_cast<size_t>(num_elements), static_cast<Isa>(isa), num_threads, &sink);
    });
    return status == 0 ? PyLong_FromUnsignedLongLong(sink) : result_of(status);
}

PyObject* py_sq_norm(PyObject*, PyObject* args) {
    int dtype, isa, num_threads;
    Address grad;
    Py_ssize_t num_elements;
    if (!PyArg_ParseTuple(args, "iKnii:sq_norm", &dtype, &grad, &num_elements, &isa, &num_threads))
        return nullptr;
    if (!in_range("dtype", dtype, NUM_DTYPES) || !in_range("isa", isa, NUM_ISAS)) return nullptr;
    double result = 0.0;
    const int status = without_gil([&] {
        return sq_norm(pointer<const void>(grad), static_cast<DType>(dtype),
                       static_cast<size_t>(num_elements), static_cast<Isa>(isa), num_threads, &result);
    });
    return status == 0 ? PyFloat_FromDouble(result) : result_of(status);
}

PyObject* py_accumulate(PyObject*, PyObject* args) {
    int acc_dtype, grad_dtype, isa, num_threads;
    Address acc, grad;
    Py_ssize_t num_elements;
    if (!PyArg_ParseTuple(args, "iiKKnii:accumulate", &acc_dtype, &grad_dtype, &acc, &grad, &num_elements,
                          &isa, &num_threads)) {
        return nullptr;
    }
    if (!in_range("acc_dtype", acc_dtype, NUM_DTYPES) || !in_range("grad_dtype", grad_dtype, NUM_DTYPES) ||
        !in_range("isa", isa, NUM_ISAS)) {
        return nullptr;
    }
    return result_of(without_gil([&] {
        return accumulate(pointer<void>(acc), static_cast<DType>(acc_dtype), pointer<const void>(grad),
                          static_cast<DType>(grad_dtype), static_cast<size_t>(num_elements),
                          static_cast<Isa>(isa), num_threads);
    }));
}

PyObject* py_split_master(PyObject*, PyObject* args) {
    int isa, num_threads;
    Address master, param, remainder;
    Py_ssize_t num_elements;
    if (!PyArg_ParseTuple(args, "KKKnii:split_master", &master, &param, &remainder, &num_elements, &isa,
                          &num_threads) ||
        !in_range("isa", isa, NUM_ISAS)) {
        return nullptr;
    }
    return result_of(without_gil([&] {
        return split_master(pointer<const float>(master), pointer<uint16_t>(param),
                            pointer<int16_t>(remainder), static_cast<size_t>(num_elements),
                            static_cast<Isa>(isa), num_threads);
    }));
}

PyObject* py_join_master(PyObject*, PyObject* args) {
    int isa, num_threads;
    Address master, param, remainder;
    Py_ssize_t num_elements;
    if (!PyArg_ParseTuple(args, "KKKnii:join_master", &param, &remainder, &master, &num_elements, &isa,
                          &num_threads) ||
        !in_range("isa", isa, NUM_ISAS)) {
        return nullptr;
    }
    return result_of(without_gil([&] {
        return join_master(pointer<const uint16_t>(param), pointer<const int16_t>(remainder),
                           pointer<float>(master), static_cast<size_t>(num_elements), static_cast<Isa>(isa),
                           num_threads);
    }));
}

PyObject* py_copy_bytes(PyObject*, PyObject* args) {
    int num_threads;
    Address dst, src;
    Py_ssize_t num_bytes;
    if (!PyArg_ParseTuple(args, "KKni:copy_bytes", &dst, &src, &num_bytes, &num_threads)) return nullptr;
    return result_of(without_gil([&] {
        return copy_bytes(pointer<void>(dst), pointer<const void>(src), static_cast<size_t>(num_bytes),
                          num_threads);
    }));
}

PyObject* py_split_join_exhaustive(PyObject*, PyObject* args) {
    int isa, num_threads;
    if (!PyArg_ParseTuple(args, "ii:split_join_exhaustive", &isa, &num_threads)) return nullptr;
    if (!in_range("isa", isa, NUM_ISAS)) return nullptr;
    uint64_t num_mismatches = 0;
    const int status = without_gil(
        [&] { return split_join_exhaustive(static_cast<Isa>(isa), num_threads, &num_mismatches); });
    return status == 0 ? PyLong_FromUnsignedLongLong(num_mismatches) : result_of(status);
}

PyObject* py_set_cores(PyObject*, PyObject* args) {
    const char* mask;
    Py_ssize_t num_bytes;
    if (!PyArg_ParseTuple(args, "y#:set_cores", &mask, &num_bytes)) return nullptr;
    return result_of(set_cores(reinterpret_cast<const unsigned char*>(mask), static_cast<size_t>(num_bytes)));
}

PyMethodDef methods[] = {
    {"set_cores", py_set_cores, METH_VARARGS, "set_cores(mask: bytes): bit k of byte b is CPU 8 b + k"},
    {"isa_supported", py_isa_supported, METH_VARARGS, "isa_supported(isa) -> bool"},
    {"adam_step", py_adam_step, METH_VARARGS,
     "adam_step(layout, grad_dtype, param, master, exp_avg, exp_avg_sq, grad, num_elements, isa, "
     "num_threads, scalars, with_sq_norm) -> None or the squared norm"},
    {"lion_step", py_lion_step, METH_VARARGS,
     "lion_step(layout, grad_dtype, param, master, exp_avg, grad, num_elements, isa, num_threads, scalars, "
     "with_sq_norm) -> None or the squared norm"},
    {"adagrad_step", py_adagrad_step, METH_VARARGS,
     "adagrad_step(layout, grad_dtype, param, master, sum, grad, num_elements, isa, num_threads, scalars, "
     "with_sq_norm) -> None or the squared norm"},
    {"compact_adam_step", py_compact_adam_step, METH_VARARGS,
     "compact_adam_step(grad_dtype, compact, grad, num_elements, isa, num_threads, scalars, step, "
     "with_sq_norm) -> None or the squared norm; compact = (param, remainder, exp_avg, exp_avg_sq, scales)"},
    {"compact_encode", py_compact_encode, METH_VARARGS,
     "compact_encode(state, compact, num_elements, isa, num_threads); state = (master, exp_avg, exp_avg_sq)"},
    {"compact_decode", py_compact_decode, METH_VARARGS,
     "compact_decode(compact, state, num_elements, isa, num_threads)"},
    {"stream", py_stream, METH_VARARGS,
     "stream(arrays, num_written, prefetch, num_elements, isa, num_threads) -> a value of all that was read; "
     "arrays = ((address, element_size), ...)"},
    {"sq_norm", py_sq_norm, METH_VARARGS, "sq_norm(dtype, grad, num_elements, isa, num_threads) -> float"},
    {"accumulate", py_accumulate, METH_VARARGS,
     "accumulate(acc_dtype, grad_dtype, acc, grad, num_elements, isa, num_threads)"},
    {"split_master", py_split_master, METH_VARARGS,
     "split_master(master, param, remainder, num_elements, isa, num_threads)"},
    {"join_master", py_join_master, METH_VARARGS,
     "join_master(param, remainder, master, num_elements, isa, num_threads)"},
    {"copy_bytes", py_copy_bytes, METH_VARARGS, "copy_bytes(dst, src, num_bytes, num_threads)"},
    {"split_join_exhaustive", py_split_join_exhaustive, METH_VARARGS,
     "split_join_exhaustive(isa, num_threads) -> number of the 2**32 patterns that fail"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                          "_cpu_adam",
                          "Optimizer kernels; see csrc/cpu_adam/cpu_adam.h.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu_adam() { return PyModule_Create(&module_def); }
