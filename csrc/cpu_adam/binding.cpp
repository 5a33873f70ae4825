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

PyObject* py_adam_step(PyObject*, PyObject* args) {
    int layout, grad_dtype, isa, num_threads, decoupled;
    Address param, master, exp_avg, exp_avg_sq, grad;
    Py_ssize_t num_elements;
    AdamScalars s;
    if (!PyArg_ParseTuple(args, "iiKKKKKnii(ffffffffffp):adam_step", &layout, &grad_dtype, &param, &master,
                          &exp_avg, &exp_avg_sq, &grad, &num_elements, &isa, &num_threads, &s.grad_scale,
                          &s.beta1, &s.one_minus_beta1, &s.beta2, &s.one_minus_beta2, &s.eps, &s.step_size,
                          &s.inv_sqrt_bias_correction2, &s.decay, &s.weight_decay, &decoupled)) {
        return nullptr;
    }
    if (!in_range("layout", layout, NUM_LAYOUTS) || !in_range("grad_dtype", grad_dtype, NUM_DTYPES) ||
        !in_range("isa", isa, NUM_ISAS)) {
        return nullptr;
    }
    s.decoupled = decoupled != 0;
    const AdamBuffers buffers{pointer<void>(param), pointer<void>(master), pointer<float>(exp_avg),
                              pointer<float>(exp_avg_sq), pointer<const void>(grad)};
    return result_of(without_gil([&] {
        return adam_step(buffers, static_cast<Layout>(layout), static_cast<DType>(grad_dtype), s,
                         static_cast<size_t>(num_elements), static_cast<Isa>(isa), num_threads);
    }));
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

PyMethodDef methods[] = {
    {"isa_supported", py_isa_supported, METH_VARARGS, "isa_supported(isa) -> bool"},
    {"adam_step", py_adam_step, METH_VARARGS,
     "adam_step(layout, grad_dtype, param, master, exp_avg, exp_avg_sq, grad, num_elements, isa, "
     "num_threads, "
     "scalars)"},
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
