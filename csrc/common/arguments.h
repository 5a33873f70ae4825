// The checks of the bindings' arguments, as far as numbers allow. The typed calls in Python check the
// tensors; a mistake there, or a caller that goes around them, must end in an exception and not in a signal.
#pragma once

#include <Python.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <new>

namespace offloadzero {

// For the "O&" of PyArg_ParseTuple: an integer from 0 to 2^64 - 1. The formats "K" and "I" take any other
// modulo 2^64, or 2^32.
inline int read_unsigned(PyObject* object, void* result) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(object);
    if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) return 0;
    *static_cast<uint64_t*>(result) = value;
    return 1;
}

template <class T>
T* pointer(uint64_t address) {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

inline bool check_range(const char* name, long long value, long long low, long long high) {
    if (value >= low && value <= high) return true;
    PyErr_Format(PyExc_ValueError, "%s = %lld: allowed %lld to %lld", name, value, low, high);
    return false;
}

inline bool check_range(const char* name, uint64_t value, uint64_t low, uint64_t high) {
    if (value >= low && value <= high) return true;
    PyErr_Format(PyExc_ValueError, "%s = %llu: allowed %llu to %llu", name,
                 static_cast<unsigned long long>(value), static_cast<unsigned long long>(low),
                 static_cast<unsigned long long>(high));
    return false;
}

inline bool check_tuple(const char* name, PyObject* object) {
    if (PyTuple_Check(object)) return true;
    PyErr_Format(PyExc_TypeError, "%s: must be a tuple", name);
    return false;
}

// One array of a caller. Without elements, or with elements of no size, nothing is touched, and any address
// is valid.
struct Array {
    const char* name;
    uint64_t address;
    int64_t num_elements;
    uint64_t element_size;
    bool is_written;

    uint64_t num_bytes() const { return static_cast<uint64_t>(num_elements) * element_size; }
    bool overlaps(const Array& other) const {
        return address < other.address + other.num_bytes() && other.address < address + num_bytes();
    }
};

// Whether all pages of the range belong to some mapping. msync(MS_ASYNC) starts no writing (Linux 2.6.19): it
// walks the mappings, and says ENOMEM where there is none. Any other refusal tells nothing.
inline bool is_mapped(uint64_t address, uint64_t num_bytes) {
    const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t begin = address / page * page;
    return msync(pointer<void>(begin), address + num_bytes - begin, MS_ASYNC) == 0 || errno != ENOMEM;
}

inline bool check_array(const Array& array) {
    const auto refuse = [&array](const char* why) {
        PyErr_Format(PyExc_ValueError, "%s: %s", array.name, why);
        return false;
    };
    if (array.num_elements < 0) return refuse("the number of elements is negative");
    if (array.num_elements == 0 || array.element_size == 0) return true;
    uint64_t num_bytes, end;
    if (__builtin_mul_overflow(static_cast<uint64_t>(array.num_elements), array.element_size, &num_bytes) ||
        __builtin_add_overflow(array.address, num_bytes, &end)) {
        return refuse("goes past the end of memory");
    }
    if (array.address == 0) return refuse("has no address");
    if (array.address % std::min<uint64_t>(array.element_size, 8) != 0) {
        return refuse("is not aligned to its elements");
    }
    return is_mapped(array.address, num_bytes) || refuse("is no memory of this process");
}

// Checks each array by itself; one that is written may not share a byte with another.
inline bool check_arrays(std::initializer_list<Array> arrays) {
    for (const Array& array : arrays) {
        if (!check_array(array)) return false;
    }
    for (const Array& one : arrays) {
        for (const Array& other : arrays) {
            if (&one == &other || !one.is_written || one.num_bytes() == 0 || other.num_bytes() == 0) continue;
            if (one.overlaps(other)) {
                PyErr_Format(PyExc_ValueError, "%s and %s overlap", one.name, other.name);
                return false;
            }
        }
    }
    return true;
}

// No C++ exception may cross into Python.
template <auto function, class... Arguments>
PyObject* guarded(Arguments... arguments) {
    try {
        return function(arguments...);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
}

}  // namespace offloadzero
