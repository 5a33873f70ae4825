// The Python module: addresses and sizes as plain ints, limited API 3.10. offloadzero/native/kernels.py
// checks the tensors; here arguments are checked as far as numbers allow (common/arguments.h).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cerrno>
#include <vector>

#include "../common/arguments.h"
#include "cpu_adam.h"

namespace {

using namespace offloadzero;
using namespace offloadzero::cpu_adam;
using Address = uint64_t;

constexpr int MAX_THREADS = 1024;  // as in offloadzero/core/constants.py
constexpr uint64_t DTYPE_BYTES[NUM_DTYPES] = {2, 2, 4};
constexpr uint64_t PARAM_BYTES[NUM_LAYOUTS] = {2, 4, 2, 2};
constexpr uint64_t MASTER_BYTES[NUM_LAYOUTS] = {2, 0, 4, 4};

bool in_range(const char* name, int value, int count) { return check_range(name, value, 0LL, count - 1); }

bool is_how_to_run(int isa, int num_threads) {
    return in_range("isa", isa, NUM_ISAS) && check_range("num_threads", num_threads, 1LL, MAX_THREADS);
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

// These are for PyArg_ParseTuple's "O&".
int read_scalars(PyObject* tuple, void* result) {
    auto* s = static_cast<StepScalars*>(result);
    int decoupled;
    if (!check_tuple("scalars", tuple)) return 0;
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
    int layout, grad_dtype, isa, num_threads;
    Address param, master, exp_avg, exp_avg_sq, grad;
    Py_ssize_t num_elements;
    StepScalars scalars;
    if (!PyArg_ParseTuple(args, "iiO&O&O&O&O&niiO&:adam_step", &layout, &grad_dtype, read_unsigned, &param,
                          read_unsigned, &master, read_unsigned, &exp_avg, read_unsigned, &exp_avg_sq,
                          read_unsigned, &grad, &num_elements, &isa, &num_threads, read_scalars, &scalars) ||
        !in_range("layout", layout, NUM_LAYOUTS) || !in_range("grad_dtype", grad_dtype, NUM_DTYPES) ||
        !is_how_to_run(isa, num_threads) ||
        !check_arrays({{"param", param, num_elements, PARAM_BYTES[layout], true},
                       {"master", master, num_elements, MASTER_BYTES[layout], true},
                       {"exp_avg", exp_avg, num_elements, 4, true},
                       {"exp_avg_sq", exp_avg_sq, num_elements, 4, true},
                       {"grad", grad, num_elements, DTYPE_BYTES[grad_dtype], false}})) {
        return nullptr;
    }
    const AdamBuffers buffers{pointer<void>(param), pointer<void>(master), pointer<float>(exp_avg),
                              pointer<float>(exp_avg_sq), pointer<const void>(grad)};
    return result_of(without_gil([&] {
        return adam_step(buffers, static_cast<Layout>(layout), static_cast<DType>(grad_dtype), scalars,
                         static_cast<size_t>(num_elements), static_cast<Isa>(isa), num_threads);
    }));
}

using MomentStep = int (*)(const MomentBuffers&, Layout, DType, const StepScalars&, size_t, Isa, int);

PyObject* moment_step(MomentStep step, PyObject* args) {
    int layout, grad_dtype, isa, num_threads;
    Address param, master, moment, grad;
    Py_ssize_t num_elements;
    StepScalars scalars;
    if (!PyArg_ParseTuple(args, "iiO&O&O&O&niiO&", &layout, &grad_dtype, read_unsigned, &param, read_unsigned,
                          &master, read_unsigned, &moment, read_unsigned, &grad, &num_elements, &isa,
                          &num_threads, read_scalars, &scalars) ||
        !in_range("layout", layout, NUM_LAYOUTS) || !in_range("grad_dtype", grad_dtype, NUM_DTYPES) ||
        !is_how_to_run(isa, num_threads) ||
        !check_arrays({{"param", param, num_elements, PARAM_BYTES[layout], true},
                       {"master", master, num_elements, MASTER_BYTES[layout], true},
                       {"moment", moment, num_elements, 4, true},
                       {"grad", grad, num_elements, DTYPE_BYTES[grad_dtype], false}})) {
        return nullptr;
    }
    const MomentBuffers buffers{pointer<void>(param), pointer<void>(master), pointer<float>(moment),
                                pointer<const void>(grad)};
    return result_of(without_gil([&] {
        return step(buffers, static_cast<Layout>(layout), static_cast<DType>(grad_dtype), scalars,
                    static_cast<size_t>(num_elements), static_cast<Isa>(isa), num_threads);
    }));
}

PyObject* py_lion_step(PyObject*, PyObject* args) { return moment_step(lion_step, args); }
PyObject* py_adagrad_step(PyObject*, PyObject* args) { return moment_step(adagrad_step, args); }
PyObject* py_sgd_step(PyObject*, PyObject* args) { return moment_step(sgd_step, args); }

// The addresses of a compact state, in the order of the tuple.
struct CompactAddresses {
    Address param, remainder, exp_avg, exp_avg_sq, scales;

    CompactBuffers buffers(Address grad) const {
        return {pointer<uint16_t>(param),     pointer<int8_t>(remainder), pointer<int8_t>(exp_avg),
                pointer<uint8_t>(exp_avg_sq), pointer<float>(scales),     pointer<const void>(grad)};
    }
};

int64_t num_scales(Py_ssize_t num_elements) {
    constexpr auto BLOCK = static_cast<int64_t>(COMPACT_BLOCK);
    return num_elements < 0 ? num_elements : 2 * (num_elements / BLOCK + (num_elements % BLOCK != 0));
}

// For "O&": (param, remainder, exp_avg, exp_avg_sq, scales).
int read_compact(PyObject* tuple, void* result) {
    auto* a = static_cast<CompactAddresses*>(result);
    return check_tuple("compact", tuple) &&
           PyArg_ParseTuple(tuple, "O&O&O&O&O&:compact", read_unsigned, &a->param, read_unsigned,
                            &a->remainder, read_unsigned, &a->exp_avg, read_unsigned, &a->exp_avg_sq,
                            read_unsigned, &a->scales);
}

struct StateAddresses {
    Address master, exp_avg, exp_avg_sq;

    Fp32State buffers() const {
        return {pointer<float>(master), pointer<float>(exp_avg), pointer<float>(exp_avg_sq)};
    }
};

// For "O&": (master, exp_avg, exp_avg_sq).
int read_fp32_state(PyObject* tuple, void* result) {
    auto* a = static_cast<StateAddresses*>(result);
    return check_tuple("state", tuple) &&
           PyArg_ParseTuple(tuple, "O&O&O&:state", read_unsigned, &a->master, read_unsigned, &a->exp_avg,
                            read_unsigned, &a->exp_avg_sq);
}

PyObject* py_compact_adam_step(PyObject*, PyObject* args) {
    int grad_dtype, isa, num_threads;
    Address grad;
    Py_ssize_t num_elements;
    CompactAddresses compact;
    StepScalars scalars;
    unsigned int step;  // "I" takes it modulo 2^32
    if (!PyArg_ParseTuple(args, "iO&O&niiO&I:compact_adam_step", &grad_dtype, read_compact, &compact,
                          read_unsigned, &grad, &num_elements, &isa, &num_threads, read_scalars, &scalars,
                          &step) ||
        !in_range("grad_dtype", grad_dtype, NUM_DTYPES) || !is_how_to_run(isa, num_threads) ||
        !check_arrays({{"param", compact.param, num_elements, 2, true},
                       {"remainder", compact.remainder, num_elements, 1, true},
                       {"exp_avg", compact.exp_avg, num_elements, 1, true},
                       {"exp_avg_sq", compact.exp_avg_sq, num_elements, 1, true},
                       {"scales", compact.scales, num_scales(num_elements), 4, true},
                       {"grad", grad, num_elements, DTYPE_BYTES[grad_dtype], false}})) {
        return nullptr;
    }
    return result_of(without_gil([&] {
        return compact_adam_step(compact.buffers(grad), static_cast<DType>(grad_dtype), scalars, step,
                                 static_cast<size_t>(num_elements), static_cast<Isa>(isa), num_threads);
    }));
}

// Checks the arrays of a conversion; `encodes` decides which of the two states is written.
bool check_conversion(const StateAddresses& state, const CompactAddresses& compact, Py_ssize_t num_elements,
                      bool encodes) {
    return check_arrays({{"master", state.master, num_elements, 4, !encodes},
                         {"exp_avg", state.exp_avg, num_elements, 4, !encodes},
                         {"exp_avg_sq", state.exp_avg_sq, num_elements, 4, !encodes},
                         {"compact param", compact.param, num_elements, 2, encodes},
                         {"compact remainder", compact.remainder, num_elements, 1, encodes},
                         {"compact exp_avg", compact.exp_avg, num_elements, 1, encodes},
                         {"compact exp_avg_sq", compact.exp_avg_sq, num_elements, 1, encodes},
                         {"compact scales", compact.scales, num_scales(num_elements), 4, encodes}});
}

PyObject* py_compact_encode(PyObject*, PyObject* args) {
    int isa, num_threads;
    Py_ssize_t num_elements;
    StateAddresses state;
    CompactAddresses compact;
    if (!PyArg_ParseTuple(args, "O&O&nii:compact_encode", read_fp32_state, &state, read_compact, &compact,
                          &num_elements, &isa, &num_threads) ||
        !is_how_to_run(isa, num_threads) || !check_conversion(state, compact, num_elements, true)) {
        return nullptr;
    }
    return result_of(without_gil([&] {
        return compact_encode(state.buffers(), compact.buffers(0), static_cast<size_t>(num_elements),
                              static_cast<Isa>(isa), num_threads);
    }));
}

PyObject* py_compact_decode(PyObject*, PyObject* args) {
    int isa, num_threads;
    Py_ssize_t num_elements;
    StateAddresses state;
    CompactAddresses compact;
    if (!PyArg_ParseTuple(args, "O&O&nii:compact_decode", read_compact, &compact, read_fp32_state, &state,
                          &num_elements, &isa, &num_threads) ||
        !is_how_to_run(isa, num_threads) || !check_conversion(state, compact, num_elements, false)) {
        return nullptr;
    }
    return result_of(without_gil([&] {
        return compact_decode(compact.buffers(0), state.buffers(), static_cast<size_t>(num_elements),
                              static_cast<Isa>(isa), num_threads);
    }));
}

// The next array of stream()'s tuple, whose lines are read as eight 64-bit words.
bool read_stream_array(PyObject* item, Py_ssize_t num_elements, bool is_written, Array* array) {
    Address address, element_size;
    if (!check_tuple("array", item) ||
        !PyArg_ParseTuple(item, "O&O&:array", read_unsigned, &address, read_unsigned, &element_size) ||
        !check_range("element_size", element_size, uint64_t{1}, uint64_t{16})) {
        return false;
    }
    *array = {"array", address, num_elements, element_size, is_written};
    if (address % 8 == 0) return check_array(*array);
    PyErr_SetString(PyExc_ValueError, "array: is not aligned to 8 bytes");
    return false;
}

PyObject* py_stream(PyObject*, PyObject* args) {
    PyObject* list;
    int num_written, prefetch, isa, num_threads;
    Py_ssize_t num_elements;
    if (!PyArg_ParseTuple(args, "O!ipnii:stream", &PyTuple_Type, &list, &num_written, &prefetch,
                          &num_elements, &isa, &num_threads) ||
        !is_how_to_run(isa, num_threads)) {
        return nullptr;
    }
    const Py_ssize_t num_arrays = PyTuple_Size(list);
    if (!check_range("number of arrays", num_arrays, 0LL, static_cast<long long>(MAX_STREAM_ARRAYS)) ||
        !check_range("num_written", num_written, 0LL, num_arrays)) {
        return nullptr;
    }
    StreamArrays arrays{};
    arrays.num_arrays = static_cast<size_t>(num_arrays);
    arrays.num_written = static_cast<size_t>(num_written);
    arrays.prefetch = prefetch != 0;
    Array checked[MAX_STREAM_ARRAYS];
    for (Py_ssize_t k = 0; k < num_arrays; ++k) {
        Array& array = checked[k];
        if (!read_stream_array(PyTuple_GetItem(list, k), num_elements, k < num_written, &array))
            return nullptr;
        for (Py_ssize_t before = 0; before < std::min<Py_ssize_t>(k, num_written); ++before) {
            if (!check_arrays({checked[before], array})) return nullptr;
        }
        arrays.address[k] = pointer<void>(array.address);
        arrays.element_size[k] = array.element_size;
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
    if (!PyArg_ParseTuple(args, "iO&nii:sq_norm", &dtype, read_unsigned, &grad, &num_elements, &isa,
                          &num_threads) ||
        !in_range("dtype", dtype, NUM_DTYPES) || !is_how_to_run(isa, num_threads) ||
        !check_arrays({{"grad", grad, num_elements, DTYPE_BYTES[dtype], false}})) {
        return nullptr;
    }
    double result = 0.0;
    const int status = without_gil([&] {
        return sq_norm(pointer<const void>(grad), static_cast<DType>(dtype),
                       static_cast<size_t>(num_elements), static_cast<Isa>(isa), num_threads, &result);
    });
    return status == 0 ? PyFloat_FromDouble(result) : result_of(status);
}

// The parts of sq_norms(): a tuple of tuples (start, stop).
bool read_parts(PyObject* tuple, Py_ssize_t num_elements, std::vector<Part>* parts) {
    const Py_ssize_t num_parts = PyTuple_Size(tuple);
    parts->resize(static_cast<size_t>(num_parts));
    for (Py_ssize_t k = 0; k < num_parts; ++k) {
        PyObject* item = PyTuple_GetItem(tuple, k);
        Py_ssize_t start, stop;
        if (!check_tuple("part", item) || !PyArg_ParseTuple(item, "nn:part", &start, &stop) ||
            !check_range("stop", stop, 0LL, num_elements) || !check_range("start", start, 0LL, stop)) {
            return false;
        }
        (*parts)[static_cast<size_t>(k)] = {static_cast<size_t>(start), static_cast<size_t>(stop)};
    }
    return true;
}

PyObject* tuple_of(const std::vector<double>& values) {
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(values.size()));
    for (size_t k = 0; tuple != nullptr && k < values.size(); ++k) {
        PyObject* value = PyFloat_FromDouble(values[k]);
        if (value == nullptr || PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(k), value) != 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

PyObject* py_sq_norms(PyObject*, PyObject* args) {
    PyObject* tuple;
    int dtype, isa, num_threads;
    Address grad;
    Py_ssize_t num_elements;
    std::vector<Part> parts;
    if (!PyArg_ParseTuple(args, "iO&nO!ii:sq_norms", &dtype, read_unsigned, &grad, &num_elements,
                          &PyTuple_Type, &tuple, &isa, &num_threads) ||
        !in_range("dtype", dtype, NUM_DTYPES) || !is_how_to_run(isa, num_threads) ||
        !check_arrays({{"grad", grad, num_elements, DTYPE_BYTES[dtype], false}}) ||
        !read_parts(tuple, num_elements, &parts)) {
        return nullptr;
    }
    std::vector<double> results(parts.size());
    const int status = without_gil([&] {
        return sq_norms(pointer<const void>(grad), static_cast<DType>(dtype), parts.data(), parts.size(),
                        static_cast<Isa>(isa), num_threads, results.data());
    });
    return status == 0 ? tuple_of(results) : result_of(status);
}

PyObject* py_accumulate(PyObject*, PyObject* args) {
    int acc_dtype, grad_dtype, isa, num_threads;
    Address acc, grad;
    Py_ssize_t num_elements;
    if (!PyArg_ParseTuple(args, "iiO&O&nii:accumulate", &acc_dtype, &grad_dtype, read_unsigned, &acc,
                          read_unsigned, &grad, &num_elements, &isa, &num_threads) ||
        !in_range("acc_dtype", acc_dtype, NUM_DTYPES) || !in_range("grad_dtype", grad_dtype, NUM_DTYPES) ||
        !is_how_to_run(isa, num_threads) ||
        !check_arrays({{"acc", acc, num_elements, DTYPE_BYTES[acc_dtype], true},
                       {"grad", grad, num_elements, DTYPE_BYTES[grad_dtype], false}})) {
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
    if (!PyArg_ParseTuple(args, "O&O&O&nii:split_master", read_unsigned, &master, read_unsigned, &param,
                          read_unsigned, &remainder, &num_elements, &isa, &num_threads) ||
        !is_how_to_run(isa, num_threads) ||
        !check_arrays({{"master", master, num_elements, 4, false},
                       {"param", param, num_elements, 2, true},
                       {"remainder", remainder, num_elements, 2, true}})) {
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
    if (!PyArg_ParseTuple(args, "O&O&O&nii:join_master", read_unsigned, &param, read_unsigned, &remainder,
                          read_unsigned, &master, &num_elements, &isa, &num_threads) ||
        !is_how_to_run(isa, num_threads) ||
        !check_arrays({{"param", param, num_elements, 2, false},
                       {"remainder", remainder, num_elements, 2, false},
                       {"master", master, num_elements, 4, true}})) {
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
    if (!PyArg_ParseTuple(args, "O&O&ni:copy_bytes", read_unsigned, &dst, read_unsigned, &src, &num_bytes,
                          &num_threads) ||
        !check_range("num_threads", num_threads, 1LL, MAX_THREADS) ||
        !check_arrays({{"dst", dst, num_bytes, 1, true}, {"src", src, num_bytes, 1, false}})) {
        return nullptr;
    }
    return result_of(without_gil([&] {
        return copy_bytes(pointer<void>(dst), pointer<const void>(src), static_cast<size_t>(num_bytes),
                          num_threads);
    }));
}

PyObject* py_split_join_exhaustive(PyObject*, PyObject* args) {
    int isa, num_threads;
    if (!PyArg_ParseTuple(args, "ii:split_join_exhaustive", &isa, &num_threads)) return nullptr;
    if (!is_how_to_run(isa, num_threads)) return nullptr;
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
    {"set_cores", guarded<py_set_cores>, METH_VARARGS,
     "set_cores(mask: bytes): bit k of byte b is CPU 8 b + k"},
    {"isa_supported", guarded<py_isa_supported>, METH_VARARGS, "isa_supported(isa) -> bool"},
    {"adam_step", guarded<py_adam_step>, METH_VARARGS,
     "adam_step(layout, grad_dtype, param, master, exp_avg, exp_avg_sq, grad, num_elements, isa, "
     "num_threads, scalars)"},
    {"lion_step", guarded<py_lion_step>, METH_VARARGS,
     "lion_step(layout, grad_dtype, param, master, exp_avg, grad, num_elements, isa, num_threads, scalars)"},
    {"adagrad_step", guarded<py_adagrad_step>, METH_VARARGS,
     "adagrad_step(layout, grad_dtype, param, master, sum, grad, num_elements, isa, num_threads, scalars)"},
    {"sgd_step", guarded<py_sgd_step>, METH_VARARGS,
     "sgd_step(layout, grad_dtype, param, master, momentum_buffer, grad, num_elements, isa, num_threads, "
     "scalars)"},
    {"compact_adam_step", guarded<py_compact_adam_step>, METH_VARARGS,
     "compact_adam_step(grad_dtype, compact, grad, num_elements, isa, num_threads, scalars, step); "
     "compact = (param, remainder, exp_avg, exp_avg_sq, scales)"},
    {"compact_encode", guarded<py_compact_encode>, METH_VARARGS,
     "compact_encode(state, compact, num_elements, isa, num_threads); state = (master, exp_avg, exp_avg_sq)"},
    {"compact_decode", guarded<py_compact_decode>, METH_VARARGS,
     "compact_decode(compact, state, num_elements, isa, num_threads)"},
    {"stream", guarded<py_stream>, METH_VARARGS,
     "stream(arrays, num_written, prefetch, num_elements, isa, num_threads) -> a value of all that was read; "
     "arrays = ((address, element_size), ...)"},
    {"sq_norm", guarded<py_sq_norm>, METH_VARARGS,
     "sq_norm(dtype, grad, num_elements, isa, num_threads) -> float"},
    {"sq_norms", guarded<py_sq_norms>, METH_VARARGS,
     "sq_norms(dtype, grad, num_elements, parts, isa, num_threads) -> (float, ...); "
     "parts = ((start, stop), ...)"},
    {"accumulate", guarded<py_accumulate>, METH_VARARGS,
     "accumulate(acc_dtype, grad_dtype, acc, grad, num_elements, isa, num_threads)"},
    {"split_master", guarded<py_split_master>, METH_VARARGS,
     "split_master(master, param, remainder, num_elements, isa, num_threads)"},
    {"join_master", guarded<py_join_master>, METH_VARARGS,
     "join_master(param, remainder, master, num_elements, isa, num_threads)"},
    {"copy_bytes", guarded<py_copy_bytes>, METH_VARARGS, "copy_bytes(dst, src, num_bytes, num_threads)"},
    {"split_join_exhaustive", guarded<py_split_join_exhaustive>, METH_VARARGS,
     "split_join_exhaustive(isa, num_threads) -> number of the 2**32 patterns that fail"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                          "_kernels",
                          "Optimizer kernels; see csrc/cpu_adam/cpu_adam.h.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() { return PyModule_Create(&module_def); }
