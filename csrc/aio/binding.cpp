// The only file here that knows Python. Arguments are plain: addresses, sizes, capsules; failures come back
// as negative errno or tuples, and offloadzero/native/aio.py turns them into its exceptions. What numbers can
// tell of an argument is checked here (common/arguments.h).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cerrno>
#include <cmath>

#include "../common/arguments.h"
#include "crc32c.h"
#include "engine.h"

namespace {

using namespace offloadzero;
using namespace offloadzero::aio;

// As in offloadzero/native/aio.py.
constexpr uint64_t kMinBlockSize = 4096, kMaxBlockSize = uint64_t{1} << 30;
constexpr uint64_t kMaxThreadDepth = 4096, kMaxNumThreads = 256;
constexpr long long kMaxDelayMs = 1'000'000'000;

constexpr char kEngineName[] = "offloadzero.aio.engine";
constexpr char kFileName[] = "offloadzero.aio.file";
constexpr char kOperationName[] = "offloadzero.aio.operation";

using FileHandle = std::shared_ptr<File>;
using OperationHandle = std::shared_ptr<Operation>;

// Lets other Python threads run for its lifetime, whichever way the scope is left.
class GilRelease {
  public:
    GilRelease() : state_(PyEval_SaveThread()) {}
    ~GilRelease() { PyEval_RestoreThread(state_); }
    GilRelease(const GilRelease&) = delete;
    GilRelease& operator=(const GilRelease&) = delete;

  private:
    PyThreadState* state_;
};

// Seconds that a clock in nanoseconds can hold; others mean "no limit".
bool is_limit(double seconds) { return seconds >= 0 && seconds < 1e9; }
int64_t to_ns(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

template <typename T>
T* unwrap(PyObject* capsule, const char* name) {
    return static_cast<T*>(PyCapsule_GetPointer(capsule, name));
}

// Null with an exception set; in a forked child always: it has the memory but not the threads.
Engine* engine_of(PyObject* capsule) {
    auto* engine = unwrap<Engine>(capsule, kEngineName);
    if (engine == nullptr || engine->is_in_own_process()) return engine;
    PyErr_SetString(PyExc_RuntimeError, "the engine belongs to another process");
    return nullptr;
}

bool is_seconds(const char* name, double value) {
    if (!std::isnan(value)) return true;
    PyErr_Format(PyExc_ValueError, "%s is not a number", name);
    return false;
}

void destroy_engine(PyObject* capsule) {
    auto* engine = unwrap<Engine>(capsule, kEngineName);
    // A forked child has the memory but not the threads: leaving it alone is all that is safe.
    if (engine->is_in_own_process()) delete engine;
}

void destroy_file(PyObject* capsule) { delete unwrap<FileHandle>(capsule, kFileName); }

void destroy_operation(PyObject* capsule) { delete unwrap<OperationHandle>(capsule, kOperationName); }

// engine_create(is_uring, block_size, queue_depth, num_threads, operation_timeout_s) -> engine | -errno
// operation_timeout_s: negative: none
PyObject* engine_create(PyObject*, PyObject* args) {
    int is_uring;
    uint64_t block_size, queue_depth, num_threads;
    double operation_timeout_s;
    if (!PyArg_ParseTuple(args, "pO&O&O&d", &is_uring, read_unsigned, &block_size, read_unsigned,
                          &queue_depth, read_unsigned, &num_threads, &operation_timeout_s) ||
        !is_seconds("operation_timeout_s", operation_timeout_s) ||
        !check_range("block_size", block_size, kMinBlockSize, kMaxBlockSize) ||
        !check_range("block_size % 4096", block_size % kMinBlockSize, uint64_t{0}, uint64_t{0}) ||
        !check_range("num_threads", num_threads, uint64_t{1}, kMaxNumThreads) ||
        !check_range("queue_depth", queue_depth, uint64_t{1}, kMaxThreadDepth * num_threads)) {
        return nullptr;
    }
    EngineOptions options;
    options.queue_depth = static_cast<unsigned>(queue_depth);
    options.num_threads = static_cast<unsigned>(num_threads);
    options.kernel = is_uring ? KernelInterface::kUring : KernelInterface::kNativeAio;
    options.block_size = block_size;
    if (is_limit(operation_timeout_s)) options.operation_timeout_ns = to_ns(operation_timeout_s);
    std::unique_ptr<Engine> engine;
    int status;
    {
        GilRelease release;
        status = Engine::create(options, &engine);
    }
    if (status < 0) return PyLong_FromLong(status);
    PyObject* capsule = PyCapsule_New(engine.get(), kEngineName, destroy_engine);
    if (capsule != nullptr) engine.release();
    return capsule;
}

// engine_close(engine, should_cancel)
PyObject* engine_close(PyObject*, PyObject* args) {
    PyObject* capsule;
    int should_cancel;
    if (!PyArg_ParseTuple(args, "Op", &capsule, &should_cancel)) return nullptr;
    Engine* engine = engine_of(capsule);
    if (engine == nullptr) return nullptr;
    {
        GilRelease release;
        engine->close(should_cancel != 0);
    }
    Py_RETURN_NONE;
}

// engine_stats(engine) -> (bytes_read, bytes_written, operations, blocks, retries, bounced, fixed,
//                          registered_bytes)
PyObject* engine_stats(PyObject*, PyObject* capsule) {
    Engine* engine = engine_of(capsule);
    if (engine == nullptr) return nullptr;
    EngineStats stats = engine->stats();
    return Py_BuildValue(
        "(KKKKKKKK)", static_cast<unsigned long long>(stats.bytes_read),
        static_cast<unsigned long long>(stats.bytes_written),
        static_cast<unsigned long long>(stats.operations), static_cast<unsigned long long>(stats.blocks),
        static_cast<unsigned long long>(stats.retries), static_cast<unsigned long long>(stats.bounced),
        static_cast<unsigned long long>(stats.fixed),
        static_cast<unsigned long long>(stats.registered_bytes));
}

// engine_register_buffer(engine, address, num_bytes) -> 0 | -errno
PyObject* engine_register_buffer(PyObject*, PyObject* args) {
    PyObject* capsule;
    uint64_t address;
    Py_ssize_t num_bytes;
    if (!PyArg_ParseTuple(args, "OO&n", &capsule, read_unsigned, &address, &num_bytes)) return nullptr;
    Engine* engine = engine_of(capsule);
    if (engine == nullptr || !check_range("num_bytes", num_bytes, 1LL, PY_SSIZE_T_MAX) ||
        !check_array({"buffer", address, num_bytes, 1, true})) {
        return nullptr;
    }
    int status;
    {
        GilRelease release;
        status = engine->register_buffer(pointer<char>(address), static_cast<size_t>(num_bytes));
    }
    return PyLong_FromLong(status);
}

// engine_unregister_buffer(engine, address) -> whether it was there
PyObject* engine_unregister_buffer(PyObject*, PyObject* args) {
    PyObject* capsule;
    uint64_t address;
    if (!PyArg_ParseTuple(args, "OO&", &capsule, read_unsigned, &address)) return nullptr;
    Engine* engine = engine_of(capsule);
    if (engine == nullptr) return nullptr;
    bool was_there;
    {
        GilRelease release;
        was_there = engine->unregister_buffer(pointer<char>(address));
    }
    return PyBool_FromLong(was_there);
}

// engine_inject(engine, kind, nth, value); kind: 0 errno, 1 short, 2 delay
PyObject* engine_inject(PyObject*, PyObject* args) {
    PyObject* capsule;
    int kind;
    uint64_t nth;
    long long value;
    if (!PyArg_ParseTuple(args, "OiO&L", &capsule, &kind, read_unsigned, &nth, &value)) return nullptr;
    Engine* engine = engine_of(capsule);
    if (engine == nullptr || !check_range("kind", kind, 0LL, 2LL) ||
        !check_range("nth", nth, uint64_t{1}, UINT64_MAX) || !check_range("value", value, 0LL, kMaxDelayMs)) {
        return nullptr;
    }
    engine->faults().inject(static_cast<FaultKind>(kind), nth, value);
    Py_RETURN_NONE;
}

PyObject* engine_clear_faults(PyObject*, PyObject* capsule) {
    Engine* engine = engine_of(capsule);
    if (engine == nullptr) return nullptr;
    engine->faults().clear();
    Py_RETURN_NONE;
}

// file_open(engine, path, can_create, is_readonly, direct) -> (file, direct_refusal, alignment) | -errno
// direct: 0 off, 1 on, 2 auto; direct_refusal: -errno; direct in fact: alignment > 1
PyObject* file_open(PyObject*, PyObject* args) {
    PyObject* engine_capsule;
    const char* path;
    OpenOptions options;
    int can_create, is_readonly, direct;
    if (!PyArg_ParseTuple(args, "Oyppi", &engine_capsule, &path, &can_create, &is_readonly, &direct))
        return nullptr;
    Engine* engine = engine_of(engine_capsule);
    if (engine == nullptr || !check_range("direct", direct, 0LL, 2LL)) return nullptr;
    options.can_create = can_create != 0;
    options.is_readonly = is_readonly != 0;
    options.direct = static_cast<DirectMode>(direct);
    FileHandle file;
    int status;
    {
        GilRelease release;
        status = engine->open(path, options, &file);
    }
    if (status < 0) return PyLong_FromLong(status);
    auto handle = std::make_unique<FileHandle>(std::move(file));
    File& opened = **handle;
    PyObject* capsule = PyCapsule_New(handle.get(), kFileName, destroy_file);
    if (capsule == nullptr) return nullptr;
    handle.release();
    return Py_BuildValue("(NiK)", capsule, opened.direct_refusal(),
                         static_cast<unsigned long long>(opened.is_direct() ? opened.alignment() : 1));
}

// file_num_bytes(file) -> size | -errno
PyObject* file_num_bytes(PyObject*, PyObject* capsule) {
    auto* file = unwrap<FileHandle>(capsule, kFileName);
    if (file == nullptr) return nullptr;
    int64_t num_bytes;
    {
        GilRelease release;
        num_bytes = (*file)->num_bytes();
    }
    return PyLong_FromLongLong(num_bytes);
}

// file_preallocate(file, start, num_bytes) -> 0 | -errno
PyObject* file_preallocate(PyObject*, PyObject* args) {
    PyObject* capsule;
    long long start, num_bytes;
    if (!PyArg_ParseTuple(args, "OLL", &capsule, &start, &num_bytes)) return nullptr;
    if (start < 0 || num_bytes < start) return PyLong_FromLong(-EINVAL);
    auto* file = unwrap<FileHandle>(capsule, kFileName);
    if (file == nullptr) return nullptr;
    int status;
    {
        GilRelease release;
        status = (*file)->preallocate(start, num_bytes);
    }
    return PyLong_FromLong(status);
}

// file_sync(file) -> 0 | -errno
PyObject* file_sync(PyObject*, PyObject* capsule) {
    auto* file = unwrap<FileHandle>(capsule, kFileName);
    if (file == nullptr) return nullptr;
    int status;
    {
        GilRelease release;
        status = (*file)->sync();
    }
    return PyLong_FromLong(status);
}

// submit(engine, file, is_write, address, num_bytes, offset, priority, token) -> operation | -errno
PyObject* submit(PyObject*, PyObject* args) {
    PyObject *engine_capsule, *file_capsule;
    int is_write;
    uint64_t address, token;
    Py_ssize_t num_bytes;
    long long offset, priority;
    if (!PyArg_ParseTuple(args, "OOpO&nLLO&", &engine_capsule, &file_capsule, &is_write, read_unsigned,
                          &address, &num_bytes, &offset, &priority, read_unsigned, &token)) {
        return nullptr;
    }
    Engine* engine = engine_of(engine_capsule);
    if (engine == nullptr) return nullptr;
    auto* file = unwrap<FileHandle>(file_capsule, kFileName);
    if (file == nullptr || !check_array({"buffer", address, num_bytes, 1, !is_write}) ||
        !check_range("offset", offset, 0LL, PY_SSIZE_T_MAX - num_bytes)) {
        return nullptr;
    }
    if (!engine->owns(**file)) {
        PyErr_SetString(PyExc_ValueError, "the file belongs to another engine");
        return nullptr;
    }
    OperationRequest request;
    request.is_write = is_write != 0;
    request.file = *file;
    request.data = pointer<char>(address);
    request.num_bytes = static_cast<size_t>(num_bytes);
    request.offset = offset;
    request.priority = priority;
    request.token = token;
    // Made first: once the engine has the operation, nothing here may fail.
    auto handle = std::make_unique<OperationHandle>();
    PyObject* capsule = PyCapsule_New(handle.get(), kOperationName, destroy_operation);
    if (capsule == nullptr) return nullptr;
    OperationHandle* operation = handle.release();
    int status;
    {
        GilRelease release;
        status = engine->submit(std::move(request), operation);
    }
    if (status == 0) return capsule;
    Py_DecRef(capsule);
    return PyLong_FromLong(status);
}

// collect_finished(engine) -> [token]
PyObject* collect_finished(PyObject*, PyObject* capsule) {
    Engine* engine = engine_of(capsule);
    if (engine == nullptr) return nullptr;
    std::vector<uint64_t> tokens = engine->collect_finished();
    PyObject* list = PyList_New(0);
    for (size_t i = 0; list != nullptr && i < tokens.size(); ++i) {
        PyObject* token = PyLong_FromUnsignedLongLong(tokens[i]);
        if (token == nullptr || PyList_Append(list, token) < 0) {
            Py_DecRef(list);
            list = nullptr;
        }
        if (token != nullptr) Py_DecRef(token);
    }
    return list;
}

// Null with an exception set.
Operation* operation_of(PyObject* capsule) {
    auto* operation = unwrap<OperationHandle>(capsule, kOperationName);
    return operation == nullptr ? nullptr : operation->get();
}

Operation* operation_of(PyObject* capsule, const Engine* engine) {
    Operation* operation = operation_of(capsule);
    if (operation == nullptr || operation->engine == engine) return operation;
    PyErr_SetString(PyExc_ValueError, "the operation belongs to another engine");
    return nullptr;
}

// is_done(engine, operation) -> bool
PyObject* is_done(PyObject*, PyObject* args) {
    PyObject *engine_capsule, *capsule;
    if (!PyArg_ParseTuple(args, "OO", &engine_capsule, &capsule)) return nullptr;
    Engine* engine = engine_of(engine_capsule);
    Operation* operation = engine == nullptr ? nullptr : operation_of(capsule, engine);
    if (operation == nullptr) return nullptr;
    return PyBool_FromLong(engine->is_done(operation));
}

// Repeats `wait(limit_ns)` after signals until it gives something else. 1: the time is over, 0: done,
// -1: a signal handler raised.
template <typename Wait>
int wait_through_signals(double timeout_s, Wait wait) {
    int64_t deadline_ns = is_limit(timeout_s) ? now_ns() + to_ns(timeout_s) : -1;
    for (;;) {
        int64_t left_ns = deadline_ns < 0 ? -1 : std::max<int64_t>(deadline_ns - now_ns(), 0);
        int status;
        {
            GilRelease release;
            status = wait(left_ns);
        }
        if (status == 0) return 0;
        if (status == -ETIMEDOUT) return 1;
        if (PyErr_CheckSignals() < 0) return -1;
    }
}

// wait(engine, operation, timeout_s) -> (errno, offset) | None when the time is over; timeout_s < 0: no limit
PyObject* wait(PyObject*, PyObject* args) {
    PyObject *engine_capsule, *capsule;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "OOd", &engine_capsule, &capsule, &timeout_s)) return nullptr;
    Engine* engine = engine_of(engine_capsule);
    Operation* operation = engine == nullptr ? nullptr : operation_of(capsule, engine);
    if (operation == nullptr || !is_seconds("timeout_s", timeout_s)) return nullptr;
    int status = operation->done.is_set() ? 0 : wait_through_signals(timeout_s, [&](int64_t left_ns) {
        return engine->wait(operation, left_ns);
    });
    if (status < 0) return nullptr;
    if (status > 0) Py_RETURN_NONE;
    return Py_BuildValue("(iL)", operation->error(), static_cast<long long>(operation->error_offset()));
}

// times(operation) -> (when its first block began, when its last ended), or None before the end
PyObject* times(PyObject*, PyObject* capsule) {
    Operation* operation = operation_of(capsule);
    if (operation == nullptr) return nullptr;
    if (!operation->released.is_set()) Py_RETURN_NONE;
    int64_t begun_ns = operation->begun_ns != 0 ? operation->begun_ns : operation->ended_ns;
    return Py_BuildValue("(dd)", static_cast<double>(begun_ns) * 1e-9,
                         static_cast<double>(operation->ended_ns) * 1e-9);
}

// Whether `sums` holds one uint32 for each block of `data`.
bool check_checksums(uint64_t data, Py_ssize_t num_bytes, Py_ssize_t block_size, uint64_t sums,
                     bool writes_sums) {
    if (!check_range("num_bytes", num_bytes, 0LL, PY_SSIZE_T_MAX) ||
        !check_range("block_size", block_size, 1LL, PY_SSIZE_T_MAX)) {
        return false;
    }
    const Py_ssize_t num_blocks = num_bytes / block_size + (num_bytes % block_size != 0);
    return check_arrays({{"data", data, num_bytes, 1, false}, {"sums", sums, num_blocks, 4, writes_sums}});
}

// crc32c_blocks(address, num_bytes, block_size, sums, with_tables): one uint32 for each block goes to `sums`
PyObject* py_crc32c_blocks(PyObject*, PyObject* args) {
    uint64_t data, sums;
    Py_ssize_t num_bytes, block_size;
    int with_tables;
    if (!PyArg_ParseTuple(args, "O&nnO&p", read_unsigned, &data, &num_bytes, &block_size, read_unsigned,
                          &sums, &with_tables) ||
        !check_checksums(data, num_bytes, block_size, sums, true)) {
        return nullptr;
    }
    {
        GilRelease release;
        crc32c_blocks(pointer<const char>(data), static_cast<size_t>(num_bytes),
                      static_cast<size_t>(block_size), pointer<uint32_t>(sums), with_tables != 0);
    }
    Py_RETURN_NONE;
}

// crc32c_find_mismatch(address, num_bytes, block_size, expected) -> index of the first block, or -1
PyObject* py_crc32c_find_mismatch(PyObject*, PyObject* args) {
    uint64_t data, sums;
    Py_ssize_t num_bytes, block_size;
    if (!PyArg_ParseTuple(args, "O&nnO&", read_unsigned, &data, &num_bytes, &block_size, read_unsigned,
                          &sums) ||
        !check_checksums(data, num_bytes, block_size, sums, false)) {
        return nullptr;
    }
    int64_t index;
    {
        GilRelease release;
        index = crc32c_find_mismatch(pointer<const char>(data), static_cast<size_t>(num_bytes),
                                     static_cast<size_t>(block_size), pointer<const uint32_t>(sums));
    }
    return PyLong_FromLongLong(index);
}

PyObject* py_crc32c_implementation(PyObject*, PyObject*) {
    return PyUnicode_FromString(crc32c_implementation());
}

PyMethodDef kMethods[] = {
    {"engine_create", guarded<engine_create>, METH_VARARGS, nullptr},
    {"engine_close", guarded<engine_close>, METH_VARARGS, nullptr},
    {"engine_stats", guarded<engine_stats>, METH_O, nullptr},
    {"engine_register_buffer", guarded<engine_register_buffer>, METH_VARARGS, nullptr},
    {"engine_unregister_buffer", guarded<engine_unregister_buffer>, METH_VARARGS, nullptr},
    {"engine_inject", guarded<engine_inject>, METH_VARARGS, nullptr},
    {"engine_clear_faults", guarded<engine_clear_faults>, METH_O, nullptr},
    {"file_open", guarded<file_open>, METH_VARARGS, nullptr},
    {"file_num_bytes", guarded<file_num_bytes>, METH_O, nullptr},
    {"file_preallocate", guarded<file_preallocate>, METH_VARARGS, nullptr},
    {"file_sync", guarded<file_sync>, METH_O, nullptr},
    {"submit", guarded<submit>, METH_VARARGS, nullptr},
    {"collect_finished", guarded<collect_finished>, METH_O, nullptr},
    {"is_done", guarded<is_done>, METH_VARARGS, nullptr},
    {"wait", guarded<wait>, METH_VARARGS, nullptr},
    {"times", guarded<times>, METH_O, nullptr},
    {"crc32c_blocks", guarded<py_crc32c_blocks>, METH_VARARGS, nullptr},
    {"crc32c_find_mismatch", guarded<py_crc32c_find_mismatch>, METH_VARARGS, nullptr},
    {"crc32c_implementation", guarded<py_crc32c_implementation>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT,
                       "_aio",
                       "The asynchronous file engine (see offloadzero.native.aio).",
                       -1,
                       kMethods,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__aio() { return PyModule_Create(&kModule); }
