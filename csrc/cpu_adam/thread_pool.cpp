#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <new>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace offloadzero::cpu_adam {
namespace {

constexpr auto MAX_SPIN = std::chrono::microseconds(20);

// [Note: pool lifetime]
// The pool is reached through this pointer and never freed: at interpreter exit the workers sleep in their
// condition variable until the process is gone, and no static destructor pulls the mutex from under them.
// After fork() the child has no workers and may have inherited a locked mutex, so it forgets the pool and
// makes a new one on its first call. The handler is registered when the library is loaded: fork() runs those
// that it found at its beginning, so one registered with the first pool could come too late for a fork() on
// its way in another thread.
std::atomic<ThreadPool*> g_pool{nullptr};

void forget_pool_in_child() { g_pool.store(nullptr, std::memory_order_relaxed); }

// Fails only for want of memory, and then loading would have failed as well.
[[maybe_unused]] const int g_registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);

inline void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Signals belong to the threads of the host program: a worker is created with all of them blocked.
class BlockSignals {
  public:
    BlockSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &saved_);
    }
    ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
    BlockSignals(const BlockSignals&) = delete;
    BlockSignals& operator=(const BlockSignals&) = delete;

  private:
    sigset_t saved_;
};

}  // namespace

ThreadPool& ThreadPool::instance() {
    ThreadPool* pool = g_pool.load(std::memory_order_acquire);
    if (pool != nullptr) return *pool;
    auto* fresh = new ThreadPool;
    if (g_pool.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;  // another thread was first; this one has no workers yet
    return *pool;
}

void ThreadPool::run(Task& task, int num_threads) {
    const size_t max_helpers = task.num_blocks - 1;
    const int helpers =
        max_helpers < static_cast<size_t>(num_threads - 1) ? static_cast<int>(max_helpers) : num_threads - 1;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        start_workers(helpers);
        task.num_open_places = helpers;
        task.next = tasks_;
        tasks_ = &task;
    }
    for (int i = 0; i < helpers; ++i) work_.notify_one();
    take_blocks(task);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        unlink(task);
    }
    // No worker can join any more. Those inside are in their last block: spin for a moment, then sleep.
    const auto deadline = std::chrono::steady_clock::now() + MAX_SPIN;
    while (task.num_active.load(std::memory_order_acquire) != 0 &&
           std::chrono::steady_clock::now() < deadline) {
        pause_cpu();
    }
    // Taken even when the count is already zero: the last worker must be out of its critical section, where
    // it still touches the task, before the task goes out of scope.
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&task] { return task.num_active.load(std::memory_order_acquire) == 0; });
}

// A thread that cannot be started is not an error: the others do the work, with the same result.
void ThreadPool::start_workers(int wanted) {
    BlockSignals blocked;
    try {
        while (static_cast<int>(workers_.size()) < wanted) {
            workers_.reserve(workers_.size() + 1);  // may throw, while there is no thread yet
            std::thread worker([this] { worker_loop(); });
            workers_.push_back(worker.native_handle());
            worker.detach();
            pthread_setname_np(workers_.back(), "oz-cpu-adam");
            // Refused only if the CPUs have gone since set_cores(): then the worker runs where it may.
            if (has_cores_) pthread_setaffinity_np(workers_.back(), sizeof cores_, &cores_);
        }
    } catch (const std::system_error&) {
    } catch (const std::bad_alloc&) {
    }
}

int ThreadPool::set_cores(const cpu_set_t& cores) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (pthread_t worker : workers_) {
        const int error = pthread_setaffinity_np(worker, sizeof cores, &cores);
        if (error != 0) return -error;
    }
    cores_ = cores;
    has_cores_ = true;
    return 0;
}

void ThreadPool::worker_loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        Task* task = joinable_task();
        if (task == nullptr) {
            work_.wait(lock);
            continue;
        }
        --task->num_open_places;
        task->num_active.fetch_add(1, std::memory_order_relaxed);
        lock.unlock();
        take_blocks(*task);
        lock.lock();
        if (task->num_active.fetch_sub(1, std::memory_order_release) == 1) done_.notify_all();
    }
}

ThreadPool::Task* ThreadPool::joinable_task() {
    for (Task* task = tasks_; task != nullptr; task = task->next) {
        const bool has_work = task->next_block.load(std::memory_order_relaxed) < task->num_blocks;
        if (task->num_open_places > 0 && has_work) return task;
    }
    return nullptr;
}

void ThreadPool::unlink(Task& task) {
    Task** link = &tasks_;
    while (*link != &task) link = &(*link)->next;
    *link = task.next;
}

void ThreadPool::take_blocks(Task& task) {
    for (;;) {
        const size_t block = task.next_block.fetch_add(1, std::memory_order_relaxed);
        if (block >= task.num_blocks) return;
        task.call(task.context, block);
    }
}

}  // namespace offloadzero::cpu_adam
