// A small pool of persistent workers. Work is cut into numbered blocks handed out in order, one at a time;
// the calling thread takes blocks too, so a call always finishes even when no worker is free or could be
// started.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <vector>

namespace offloadzero::cpu_adam {

class ThreadPool {
  public:
    // The pool of this process; never destroyed, and replaced by an empty one in a forked child.
    static ThreadPool& instance();

    // Runs body(block) for block = 0 .. num_blocks - 1 on at most `num_threads` threads, this one included.
    // `body` must not throw. Any number of threads may call at once.
    template <class Body>
    void parallel_for(size_t num_blocks, int num_threads, const Body& body) {
        if (num_threads <= 1 || num_blocks <= 1) {
            for (size_t block = 0; block < num_blocks; ++block) body(block);
            return;
        }
        Task task;
        task.context = &body;
        task.call = [](const void* context, size_t block) { (*static_cast<const Body*>(context))(block); };
        task.num_blocks = num_blocks;
        run(task, num_threads);
    }

    // Keeps the workers, and those started later, on these CPUs. Returns 0 or -errno.
    int set_cores(const cpu_set_t& cores);

  private:
    struct Task {
        void (*call)(const void* context, size_t block) = nullptr;
        const void* context = nullptr;
        size_t num_blocks = 0;
        std::atomic<size_t> next_block{0};
        std::atomic<int> num_active{0};  // workers inside; changes only under the pool's mutex
        int num_open_places = 0;         // workers that may still join
        Task* next = nullptr;
    };

    ThreadPool() = default;
    void run(Task& task, int num_threads);
    void start_workers(int wanted);
    [[noreturn]] void worker_loop();
    Task* joinable_task();
    void unlink(Task& task);
    static void take_blocks(Task& task);

    std::mutex mutex_;
    std::condition_variable work_;  // a task has an open place
    std::condition_variable done_;  // a worker left a task
    Task* tasks_ = nullptr;
    std::vector<pthread_t> workers_;
    bool has_cores_ = false;
    cpu_set_t cores_;
};

}  // namespace offloadzero::cpu_adam
