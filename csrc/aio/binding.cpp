// This file alone knows Python: it has three types and the checksums. Arguments are plain numbers; a failure
// is an OSError with its errno, to which offloadzero/io/engine.py adds a name and a place. Arguments are
// checked here as far as numbers allow (common/arguments.h).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <utility>

#include "../common/arguments.h"
#include "crc32c.h"
#include "engine.h"

namespace {

using namespace offloadzero;
using namespace offloadzero::aio;

// As in offloadzero/core/constants.py.
constexpr uint64_t MIN_BLOCK_SIZE = 4096, MAX_BLOCK_SIZE = uint64_t{1} << 30;
constexpr uint64_t MAX_THREAD_DEPTH = 4096, MAX_NUM_THREADS = 256;
constexpr long long MAX_DELAY_MS = 1'000'000'000;

// Lets other Python threads run for its lifetime, however the scope is left.
class GilRelease {
  public:
    GilRelease() : state_(PyEval_SaveThread()) {}
    ~GilRelease() { PyEval_RestoreThread(state_); }
    GilRelease(const GilRelease&) = delete;
    GilRelease& operator=(const GilRelease&) = delete;

  private:
    PyThreadState* state_;
};

template <class Call>
auto without_gil(const Call& call) {
    GilRelease release;
    return call();
}

PyObject* raise_errno(int64_t status) {
    errno = static_cast<int>(-status);
    return PyErr_SetFromErrno(PyExc_OSError);
}

PyObject* none_or_error(int64_t status) {
    if (status < 0) return raise_errno(status);
    Py_RETURN_NONE;
}

// The seconds that a clock in nanoseconds can hold; others mean "no limit".
bool is_limit(double seconds) { return seconds >= 0 && seconds < 1e9; }
int64_t to_ns(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

bool is_seconds(const char* name, double value) {
    if (!std::isnan(value)) return true;
    PyErr_Format(PyExc_ValueError, "%s is not a number", name);
    return false;
}

// --- The three types. A method is called with an object of its type: Python sees to that. ---

struct EngineObject {
    PyObject_HEAD Engine* engine;
};

struct FileObject {
    PyObject_HEAD std::shared_ptr<File>* file;  // null: closed
};

struct OperationObject {
    PyObject_HEAD PyObject* engine;  // kept alive
    std::shared_ptr<Operation>* operation;
};

PyTypeObject* file_type = nullptr;
PyTypeObject* operation_type = nullptr;

template <class Object>
Object* make(PyTypeObject* type) {
    return reinterpret_cast<Object*>(PyType_GenericAlloc(type, 0));
}

void free_object(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DecRef(reinterpret_cast<PyObject*>(type));
}

PyObject* refuse_new(PyTypeObject*, PyObject*, PyObject*) {
    PyErr_SetString(PyExc_TypeError, "made by an Engine only");
    return nullptr;
}

// Returns null with an exception set; in a forked child always: it has the memory but not the threads.
Engine* engine_of(PyObject* self) {
    Engine* engine = reinterpret_cast<EngineObject*>(self)->engine;
    if (engine->is_in_own_process()) return engine;
    PyErr_SetString(PyExc_RuntimeError, "the engine belongs to another process");
    return nullptr;
}

// Returns null with an exception set.
std::shared_ptr<File> file_of(PyObject* self) {
    std::shared_ptr<File>* file = reinterpret_cast<FileObject*>(self)->file;
    if (file != nullptr) return *file;
    PyErr_SetString(PyExc_ValueError, "the file is closed");
    return nullptr;
}

Operation* operation_of(PyObject* self) { return reinterpret_cast<OperationObject*>(self)->operation->get(); }

// --- Engine ---

bool read_options(PyObject* args, EngineOptions* options) {
    int is_uring;
    uint64_t block_size, queue_depth, num_threads;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "pO&O&O&d", &is_uring, read_unsigned, &block_size, read_unsigned,
                          &queue_depth, read_unsigned, &num_threads, &timeout_s) ||
        !is_seconds("transfer_timeout_s", timeout_s) ||
        !check_range("block_size", block_size, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE) ||
        !check_range("block_size % 4096", block_size % MIN_BLOCK_SIZE, uint64_t{0}, uint64_t{0}) ||
        !check_range("num_threads", num_threads, uint64_t{1}, MAX_NUM_THREADS) ||
        !check_range("queue_depth", queue_depth, uint64_t{1}, MAX_THREAD_DEPTH * num_threads)) {
        return false;
    }
    options->kernel = is_uring ? KernelInterface::URING : KernelInterface::NATIVE_AIO;
    options->block_size = block_size;
    options->queue_depth = static_cast<unsigned>(queue_depth);
    options->num_threads = static_cast<unsigned>(num_threads);
    if (is_limit(timeout_s)) options->operation_timeout_ns = to_ns(timeout_s);
    return true;
}

// Engine(is_uring, block_size, queue_depth, num_threads, transfer_timeout_s); a negative time is no limit
PyObject* engine_new(PyTypeObject* type, PyObject* args, PyObject* /*keywords*/) {
    EngineOptions options;
    if (!read_options(args, &options)) return nullptr;
    std::unique_ptr<Engine> engine;
    int status = without_gil([&] { return Engine::create(options, &engine); });
    if (status < 0) return raise_errno(status);
    auto* self = make<EngineObject>(type);
    if (self != nullptr) self->engine = engine.release();
    return reinterpret_cast<PyObject*>(self);
}

void engine_dealloc(PyObject* self) {
    Engine* engine = reinterpret_cast<EngineObject*>(self)->engine;
    // A forked child has the memory but not the threads: the engine must be left alone.
    if (engine != nullptr && engine->is_in_own_process()) delete engine;
    free_object(self);
}

// close(should_cancel)
PyObject* engine_close(PyObject* self, PyObject* args) {
    int should_cancel;
    Engine* engine = engine_of(self);
    if (engine == nullptr || !PyArg_ParseTuple(args, "p", &should_cancel)) return nullptr;
    return none_or_error(without_gil([&] {
        engine->close(should_cancel != 0);
        return 0;
    }));
}

PyObject* engine_stats(PyObject* self, PyObject*) {
    Engine* engine = engine_of(self);
    if (engine == nullptr) return nullptr;
    const EngineStats stats = engine->stats();
    using Number = unsigned long long;
    return Py_BuildValue("{sKsKsKsKsKsKsKsK}", "bytes_read", Number{stats.bytes_read}, "bytes_written",
                         Number{stats.bytes_written}, "operations", Number{stats.operations}, "blocks",
                         Number{stats.blocks}, "retries", Number{stats.retries}, "bounced",
                         Number{stats.bounced}, "fixed", Number{stats.fixed}, "registered_bytes",
                         Number{stats.registered_bytes});
}

// register_buffer(address, num_bytes)
PyObject* engine_register_buffer(PyObject* self, PyObject* args) {
    uint64_t address;
    Py_ssize_t num_bytes;
    Engine* engine = engine_of(self);
    if (engine == nullptr || !PyArg_ParseTuple(args, "O&n", read_unsigned, &address, &num_bytes) ||
        !check_range("num_bytes", num_bytes, 1LL, PY_SSIZE_T_MAX) ||
        !check_array({"buffer", address, num_bytes, 1, true})) {
        return nullptr;
    }
    return none_or_error(without_gil(
        [&] { return engine->register_buffer(pointer<char>(address), static_cast<size_t>(num_bytes)); }));
}

// unregister_buffer(address)
PyObject* engine_unregister_buffer(PyObject* self, PyObject* args) {
    uint64_t address;
    Engine* engine = engine_of(self);
    if (engine == nullptr || !PyArg_ParseTuple(args, "O&", read_unsigned, &address)) return nullptr;
    if (without_gil([&] { return engine->unregister_buffer(pointer<char>(address)); })) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "the buffer is not registered");
    return nullptr;
}

// inject(kind, nth, value); kind: 0 errno, 1 short, 2 delay
PyObject* engine_inject(PyObject* self, PyObject* args) {
    int kind;
    uint64_t nth;
    long long value;
    Engine* engine = engine_of(self);
    if (engine == nullptr || !PyArg_ParseTuple(args, "iO&L", &kind, read_unsigned, &nth, &value) ||
        !check_range("kind", kind, 0LL, 2LL) || !check_range("nth", nth, uint64_t{1}, UINT64_MAX) ||
        !check_range("value", value, 0LL, MAX_DELAY_MS)) {
        return nullptr;
    }
    engine->faults().inject(static_cast<FaultKind>(kind), nth, value);
    Py_RETURN_NONE;
}

PyObject* engine_clear_faults(PyObject* self, PyObject*) {
    Engine* engine = engine_of(self);
    if (engine == nullptr) return nullptr;
    engine->faults().clear();
    Py_RETURN_NONE;
}

// open(path, can_create, is_readonly, can_be_direct) -> File
PyObject* engine_open(PyObject* self, PyObject* args) {
    const char* path;
    OpenOptions options;
    int can_create, is_readonly, can_be_direct;
    Engine* engine = engine_of(self);
    if (engine == nullptr ||
        !PyArg_ParseTuple(args, "yppp", &path, &can_create, &is_readonly, &can_be_direct)) {
        return nullptr;
    }
    options.can_create = can_create != 0;
    options.is_readonly = is_readonly != 0;
    options.can_be_direct = can_be_direct != 0;
    auto file = std::make_unique<std::shared_ptr<File>>();
    int status = without_gil([&] { return engine->open(path, options, file.get()); });
    if (status < 0) return raise_errno(status);
    auto* opened = make<FileObject>(file_type);
    if (opened != nullptr) opened->file = file.release();
    return reinterpret_cast<PyObject*>(opened);
}

// Returns null with an exception set.
OperationObject* make_operation(PyObject* engine) {
    auto operation = std::make_unique<std::shared_ptr<Operation>>();
    auto* made = make<OperationObject>(operation_type);
    if (made == nullptr) return nullptr;
    Py_IncRef(engine);
    made->engine = engine;
    made->operation = operation.release();
    return made;
}

// submit(file, is_write, address, num_bytes, offset, priority, token) -> Operation
PyObject* engine_submit(PyObject* self, PyObject* args) {
    PyObject* file;
    int is_write;
    uint64_t address, token;
    Py_ssize_t num_bytes;
    long long offset, priority;
    Engine* engine = engine_of(self);
    if (engine == nullptr ||
        !PyArg_ParseTuple(args, "O!pO&nLLO&", file_type, &file, &is_write, read_unsigned, &address,
                          &num_bytes, &offset, &priority, read_unsigned, &token) ||
        !check_array({"buffer", address, num_bytes, 1, !is_write}) ||
        !check_range("offset", offset, 0LL, PY_SSIZE_T_MAX - num_bytes)) {
        return nullptr;
    }
    OperationRequest request;
    request.is_write = is_write != 0;
    request.file = file_of(file);
    request.data = pointer<char>(address);
    request.num_bytes = static_cast<size_t>(num_bytes);
    request.offset = offset;
    request.priority = priority;
    request.token = token;
    if (request.file == nullptr) return nullptr;
    if (!engine->owns(*request.file)) {
        PyErr_SetString(PyExc_ValueError, "the file belongs to another engine");
        return nullptr;
    }
    // Made first: once the engine has the operation, nothing here may fail.
    OperationObject* made = make_operation(self);
    if (made == nullptr) return nullptr;
    int status = without_gil([&] { return engine->submit(std::move(request), made->operation); });
    if (status == 0) return reinterpret_cast<PyObject*>(made);
    Py_DecRef(reinterpret_cast<PyObject*>(made));
    return raise_errno(status);
}

// collect_finished() -> [token]
PyObject* engine_collect_finished(PyObject* self, PyObject*) {
    Engine* engine = engine_of(self);
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

PyMethodDef ENGINE_METHODS[] = {
    {"open", guarded<engine_open>, METH_VARARGS, nullptr},
    {"submit", guarded<engine_submit>, METH_VARARGS, nullptr},
    {"collect_finished", guarded<engine_collect_finished>, METH_NOARGS, nullptr},
    {"register_buffer", guarded<engine_register_buffer>, METH_VARARGS, nullptr},
    {"unregister_buffer", guarded<engine_unregister_buffer>, METH_VARARGS, nullptr},
    {"inject", guarded<engine_inject>, METH_VARARGS, nullptr},
    {"clear_faults", guarded<engine_clear_faults>, METH_NOARGS, nullptr},
    {"stats", guarded<engine_stats>, METH_NOARGS, nullptr},
    {"close", guarded<engine_close>, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// --- File ---

// Gives the handle up; the descriptor closes with the last operation in flight.
void drop_file(PyObject* self) {
    std::unique_ptr<std::shared_ptr<File>> file(
        std::exchange(reinterpret_cast<FileObject*>(self)->file, nullptr));
}

void file_dealloc(PyObject* self) {
    drop_file(self);
    free_object(self);
}

PyObject* file_close(PyObject* self, PyObject*) {
    drop_file(self);
    Py_RETURN_NONE;
}

PyObject* file_num_bytes(PyObject* self, PyObject*) {
    const std::shared_ptr<File> file = file_of(self);
    if (file == nullptr) return nullptr;
    int64_t num_bytes = without_gil([&] { return file->num_bytes(); });
    return num_bytes < 0 ? raise_errno(num_bytes) : PyLong_FromLongLong(num_bytes);
}

// preallocate(start, num_bytes)
PyObject* file_preallocate(PyObject* self, PyObject* args) {
    long long start, num_bytes;
    const std::shared_ptr<File> file = file_of(self);
    if (file == nullptr || !PyArg_ParseTuple(args, "LL", &start, &num_bytes)) return nullptr;
    if (start < 0 || num_bytes < start) return raise_errno(-EINVAL);
    return none_or_error(without_gil([&] { return file->preallocate(start, num_bytes); }));
}

PyObject* file_sync(PyObject* self, PyObject*) {
    const std::shared_ptr<File> file = file_of(self);
    return file == nullptr ? nullptr : none_or_error(without_gil([&] { return file->sync(); }));
}

// Returns 1 where the file is not direct.
PyObject* file_alignment(PyObject* self, void*) {
    const std::shared_ptr<File> file = file_of(self);
    return file == nullptr ? nullptr : PyLong_FromSize_t(file->is_direct() ? file->alignment() : 1);
}

// Returns the errno that direct I/O was refused with; 0: it was not refused, or not asked for.
PyObject* file_direct_refusal(PyObject* self, void*) {
    const std::shared_ptr<File> file = file_of(self);
    return file == nullptr ? nullptr : PyLong_FromLong(-file->direct_refusal());
}

PyMethodDef FILE_METHODS[] = {
    {"num_bytes", guarded<file_num_bytes>, METH_NOARGS, nullptr},
    {"preallocate", guarded<file_preallocate>, METH_VARARGS, nullptr},
    {"sync", guarded<file_sync>, METH_NOARGS, nullptr},
    {"close", guarded<file_close>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef FILE_PROPERTIES[] = {
    {"alignment", guarded<file_alignment>, nullptr, nullptr, nullptr},
    {"direct_refusal", guarded<file_direct_refusal>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// --- Operation ---

void operation_dealloc(PyObject* self) {
    auto* object = reinterpret_cast<OperationObject*>(self);
    delete object->operation;
    if (object->engine != nullptr) Py_DecRef(object->engine);
    free_object(self);
}

// done() -> bool
PyObject* operation_done(PyObject* self, PyObject*) {
    Engine* engine = engine_of(reinterpret_cast<OperationObject*>(self)->engine);
    return engine == nullptr ? nullptr : PyBool_FromLong(engine->is_done(operation_of(self)));
}

// Repeats `wait(limit_ns)` after signals until the result is another. 1: the time is over, 0: done,
// -1: a signal handler raised.
template <typename Wait>
int wait_through_signals(double timeout_s, const Wait& wait) {
    int64_t deadline_ns = is_limit(timeout_s) ? now_ns() + to_ns(timeout_s) : -1;
    for (;;) {
        int64_t left_ns = deadline_ns < 0 ? -1 : std::max<int64_t>(deadline_ns - now_ns(), 0);
        int status = without_gil([&] { return wait(left_ns); });
        if (status == 0) return 0;
        if (status == -ETIMEDOUT) return 1;
        if (PyErr_CheckSignals() < 0) return -1;
    }
}

// wait(timeout_s) -> (errno, offset) | None when the time is over; timeout_s < 0: no limit
PyObject* operation_wait(PyObject* self, PyObject* args) {
    double timeout_s;
    Engine* engine = engine_of(reinterpret_cast<OperationObject*>(self)->engine);
    Operation* operation = operation_of(self);
    if (engine == nullptr || !PyArg_ParseTuple(args, "d", &timeout_s) ||
        !is_seconds("timeout_s", timeout_s)) {
        return nullptr;
    }
    int status = operation->done.is_set() ? 0 : wait_through_signals(timeout_s, [&](int64_t left_ns) {
        return engine->wait(operation, left_ns);
    });
    if (status < 0) return nullptr;
    if (status > 0) Py_RETURN_NONE;
    return Py_BuildValue("(iL)", operation->error(), static_cast<long long>(operation->error_offset()));
}

// times() -> (when its first block began, when its last ended), or None before the end
PyObject* operation_times(PyObject* self, PyObject*) {
    const Operation* operation = operation_of(self);
    if (!operation->released.is_set()) Py_RETURN_NONE;
    int64_t begun_ns = operation->begun_ns != 0 ? operation->begun_ns : operation->ended_ns;
    return Py_BuildValue("(dd)", static_cast<double>(begun_ns) * 1e-9,
                         static_cast<double>(operation->ended_ns) * 1e-9);
}

PyMethodDef OPERATION_METHODS[] = {
    {"done", guarded<operation_done>, METH_NOARGS, nullptr},
    {"wait", guarded<operation_wait>, METH_VARARGS, nullptr},
    {"times", guarded<operation_times>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// --- Checksums ---

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

PyMethodDef METHODS[] = {
    {"crc32c_blocks", guarded<py_crc32c_blocks>, METH_VARARGS, nullptr},
    {"crc32c_find_mismatch", guarded<py_crc32c_find_mismatch>, METH_VARARGS, nullptr},
    {"crc32c_implementation", guarded<py_crc32c_implementation>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// --- The module ---

template <class Function>
void* slot(Function* function) {
    return reinterpret_cast<void*>(function);
}

// Returns null with an exception set.
PyTypeObject* add_type(PyObject* module, const char* name, size_t num_bytes, newfunc make_new,
                       destructor dealloc, PyMethodDef* methods, PyGetSetDef* properties) {
    PyType_Slot slots[] = {{Py_tp_new, slot(make_new)},
                           {Py_tp_dealloc, slot(dealloc)},
                           {Py_tp_methods, methods},
                           {properties == nullptr ? 0 : Py_tp_getset, properties},
                           {0, nullptr}};
    PyType_Spec spec = {name, static_cast<int>(num_bytes), 0, Py_TPFLAGS_DEFAULT, slots};
    auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    if (type == nullptr || PyModule_AddType(module, type) < 0) return nullptr;
    return type;
}

bool add_types(PyObject* module) {
    file_type = add_type(module, "offloadzero.io._aio.File", sizeof(FileObject), refuse_new, file_dealloc,
                         FILE_METHODS, FILE_PROPERTIES);
    operation_type = add_type(module, "offloadzero.io._aio.Operation", sizeof(OperationObject), refuse_new,
                              operation_dealloc, OPERATION_METHODS, nullptr);
    return file_type != nullptr && operation_type != nullptr &&
           add_type(module, "offloadzero.io._aio.Engine", sizeof(EngineObject), guarded<engine_new>,
                    engine_dealloc, ENGINE_METHODS, nullptr) != nullptr;
}

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT,
                      "_aio",
                      "The asynchronous file engine (see offloadzero.io.engine).",
                      -1,
                      METHODS,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__aio() {
    PyObject* module = PyModule_Create(&MODULE);
    if (module == nullptr || add_types(module)) return module;
    Py_DecRef(module);
    return nullptr;
}
