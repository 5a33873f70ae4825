// Files that are removed when SIGTERM or SIGHUP (its terminal was closed) ends the process.
//
// The default action of these signals ends a process without running any of its code, and so would leave its
// files behind. A handler in C can remove them at any moment, also while the main thread is stuck in a call:
// Python's handlers run between two of its instructions only. The handler removes the files, restores the
// default action and sends the signal again, so that the process's parent sees the signal as the cause. It is
// installed only in place of the default action, so a handler of the user's own (torchrun's, Lightning's) is
// never touched, nor is a signal that is ignored (nohup's), and a handler that is set later replaces this
// one.
//
// A forked child inherits the handler and the list. The files are its parent's: there the handler removes
// nothing.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

namespace {

constexpr int SIGNALS[] = {SIGTERM, SIGHUP};
constexpr int NUM_PLACES = 256;
constexpr size_t MAX_PATH_BYTES = 4096;

// Places are never freed, so that the handler may run at any time. Untouched ones take no memory.
struct Place {
    std::atomic<bool> is_used{false};
    char path[MAX_PATH_BYTES];
};
Place g_places[NUM_PLACES];
std::atomic<pid_t> g_owner{0};
int g_num_used = 0;  // under the interpreter's lock

void remove_files_and_end(int signal_number) {
    int saved_errno = errno;
    if (getpid() == g_owner.load()) {
        for (Place& place : g_places) {
            if (place.is_used.load()) unlink(place.path);
        }
    }
    struct sigaction by_default = {};
    by_default.sa_handler = SIG_DFL;
    sigaction(signal_number, &by_default, nullptr);
    raise(signal_number);  // blocked until this returns
    errno = saved_errno;
}

bool is_in_force(int signal_number, void (*handler)(int)) {
    struct sigaction present = {};
    return sigaction(signal_number, nullptr, &present) == 0 && !(present.sa_flags & SA_SIGINFO) &&
           present.sa_handler == handler;
}

// Replaces the handler of each signal that has `before`.
void replace_handler(void (*before)(int), void (*handler)(int)) {
    struct sigaction action = {};
    action.sa_handler = handler;
    action.sa_flags = SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int signal_number : SIGNALS) {
        if (is_in_force(signal_number, before)) sigaction(signal_number, &action, nullptr);
    }
}

// add(path: bytes) -> place, or -1 when there is no room for it
PyObject* add(PyObject*, PyObject* argument) {
    char* path;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(argument, &path, &size) < 0) return nullptr;
    if (g_owner.load() != getpid()) {  // a forked child that has files of its own
        for (Place& place : g_places) place.is_used.store(false);
        g_num_used = 0;
        g_owner.store(getpid());
    }
    for (int index = 0; index < NUM_PLACES && static_cast<size_t>(size) < MAX_PATH_BYTES; ++index) {
        Place& place = g_places[index];
        if (place.is_used.load()) continue;
        std::memcpy(place.path, path, static_cast<size_t>(size) + 1);
        place.is_used.store(true);
        ++g_num_used;
        replace_handler(SIG_DFL, remove_files_and_end);
        return PyLong_FromLong(index);
    }
    return PyLong_FromLong(-1);
}

// discard(place)
PyObject* discard(PyObject*, PyObject* argument) {
    long index = PyLong_AsLong(argument);
    if (index == -1 && PyErr_Occurred()) return nullptr;
    if (index >= 0 && index < NUM_PLACES && g_owner.load() == getpid() && g_places[index].is_used.load()) {
        g_places[index].is_used.store(false);
        if (--g_num_used == 0) replace_handler(remove_files_and_end, SIG_DFL);
    }
    Py_RETURN_NONE;
}

// is_installed() -> whether SIGTERM would run the handler
PyObject* is_installed(PyObject*, PyObject*) {
    return PyBool_FromLong(is_in_force(SIGTERM, remove_files_and_end));
}

PyMethodDef METHODS[] = {
    {"add", add, METH_O, nullptr},
    {"discard", discard, METH_O, nullptr},
    {"is_installed", is_installed, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT,
                      "_termination",
                      "Files that go with the process (see offloadzero.native.termination).",
                      -1,
                      METHODS,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__termination() { return PyModule_Create(&MODULE); }
