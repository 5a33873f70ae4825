// The core of the file engine without Python, for the sanitizers: `make native-test`.
#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/aio/device_limits.h"
#include "../../csrc/aio/engine.h"
#include "check.h"

namespace {

using namespace offloadzero::aio;

constexpr size_t BLOCK = 16384;
constexpr int64_t WAIT_NS = 60'000'000'000;
constexpr int64_t MS = 1'000'000;
constexpr int64_t LONG_MS = 3'600'000;
using Bytes = std::vector<char>;
using Ticket = std::shared_ptr<Operation>;

// A folder of its own, gone afterwards.
class Folder {
  public:
    Folder() {
        const char* parent = getenv("TMPDIR");
        name_ = std::string(parent ? parent : "/tmp") + "/aio_test.XXXXXX";
        CHECK(mkdtemp(name_.data()) != nullptr);
    }
    ~Folder() {
        for (const std::string& path : paths_) unlink(path.c_str());
        CHECK_EQUAL(rmdir(name_.c_str()), 0);  // fails when a test left a file behind
    }
    std::string path(const std::string& file) {
        paths_.push_back(name_ + "/" + file);
        return paths_.back();
    }

  private:
    std::string name_;
    std::vector<std::string> paths_;
};

Bytes random_bytes(size_t num_bytes, unsigned seed) {
    std::mt19937_64 generator(seed);
    Bytes bytes(num_bytes);
    for (char& byte : bytes) byte = static_cast<char>(generator());
    return bytes;
}

void put(const std::string& path, const Bytes& bytes) {
    int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0);
    CHECK_EQUAL(pwrite(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    close(fd);
}

Bytes get(const std::string& path) {
    int fd = open(path.c_str(), O_RDONLY);
    CHECK(fd >= 0);
    Bytes bytes(static_cast<size_t>(lseek(fd, 0, SEEK_END)));
    CHECK_EQUAL(pread(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    close(fd);
    return bytes;
}

int num_open_descriptors() {
    DIR* folder = opendir("/proc/self/fd");
    CHECK(folder != nullptr);
    int num = 0;
    while (readdir(folder) != nullptr) ++num;
    closedir(folder);
    return num;
}

// One engine and one file in it.
class Fixture {
  public:
    explicit Fixture(EngineOptions options, const Bytes& content = {}) : path(folder.path("data")) {
        options.block_size = BLOCK;
        CHECK_EQUAL(Engine::create(options, &engine), 0);
        put(path, content);
        file = open_file();
    }

    std::shared_ptr<File> open_file() {
        std::shared_ptr<File> opened;
        CHECK_EQUAL(engine->open(path, OpenOptions(), &opened), 0);
        return opened;
    }

    Ticket submit(bool is_write, char* data, size_t num_bytes, int64_t offset) {
        OperationRequest request;
        request.is_write = is_write;
        request.file = file;
        request.data = data;
        request.num_bytes = num_bytes;
        request.offset = offset;
        Ticket ticket;
        CHECK_EQUAL(engine->submit(std::move(request), &ticket), 0);
        return ticket;
    }

    int finish(const Ticket& ticket) {
        CHECK_EQUAL(engine->wait(ticket.get(), WAIT_NS), 0);
        return ticket->error();
    }

    Folder folder;
    std::string path;
    std::unique_ptr<Engine> engine;
    std::shared_ptr<File> file;
};

void test_odd_sizes_and_offsets(const EngineOptions& options) {
    Bytes old = random_bytes(8 * BLOCK + 77, 1);
    for (size_t size : {size_t(0), size_t(1), size_t(511), size_t(4096), size_t(4097), 3 * BLOCK - 1,
                        3 * BLOCK, 3 * BLOCK + 1}) {
        for (int64_t offset : {0, 1, 199, 4095, 4096, 65536 + 512}) {
            Fixture fixture(options, old);
            Bytes data = random_bytes(size, 2);
            CHECK_EQUAL(fixture.finish(fixture.submit(true, data.data(), size, offset)), 0);
            Bytes expected = old;
            std::copy(data.begin(), data.end(), expected.begin() + offset);
            CHECK(get(fixture.path) == expected);
            Bytes back(size);
            CHECK_EQUAL(fixture.finish(fixture.submit(false, back.data(), size, offset)), 0);
            CHECK(back == data);
        }
    }
}

// Ranges next to each other, from several threads: most share an alignment unit with a neighbour.
void test_threads_write_side_by_side(const EngineOptions& options) {
    constexpr size_t THREADS = 4, PIECES = 120, PIECE = 1001;
    Bytes data = random_bytes(THREADS * PIECES * PIECE, 3);
    Fixture fixture(options, Bytes(data.size()));
    std::vector<std::thread> threads;
    for (size_t thread = 0; thread < THREADS; ++thread) {
        threads.emplace_back([&, thread] {
            std::vector<Ticket> tickets;
            for (size_t piece = 0; piece < PIECES; ++piece) {
                size_t at = (piece * THREADS + thread) * PIECE;
                tickets.push_back(fixture.submit(true, &data[at], PIECE, static_cast<int64_t>(at)));
            }
            for (const Ticket& ticket : tickets) CHECK_EQUAL(fixture.finish(ticket), 0);
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(get(fixture.path) == data);
    CHECK_EQUAL(fixture.engine->collect_finished().size(), THREADS * PIECES);
}

void test_short_transfers_continue(const EngineOptions& options) {
    for (int64_t num_short : {1, 512, 4096, 5000}) {
        Bytes data = random_bytes(5 * BLOCK + 1001, 4);
        Fixture fixture(options, Bytes(8 * BLOCK));
        for (uint64_t nth = 1; nth <= 4; ++nth)
            fixture.engine->faults().inject(FaultKind::SHORT, nth, num_short);
        CHECK_EQUAL(fixture.finish(fixture.submit(true, data.data(), data.size(), BLOCK - 7)), 0);
        for (uint64_t nth = 1; nth <= 4; ++nth)
            fixture.engine->faults().inject(FaultKind::SHORT, nth, num_short);
        Bytes back(data.size());
        CHECK_EQUAL(fixture.finish(fixture.submit(false, back.data(), back.size(), BLOCK - 7)), 0);
        CHECK(back == data);
        CHECK(fixture.engine->stats().retries > 0);
    }
}

void test_faults_end_their_operation_only(const EngineOptions& options) {
    Bytes content = random_bytes(64 * BLOCK, 5);
    Fixture fixture(options, content);
    std::mt19937 random(6);
    for (int turn = 0; turn < 150; ++turn) {
        int error = turn % 3 == 0 ? EINTR : turn % 3 == 1 ? EIO : ENOSPC;
        fixture.engine->faults().inject(FaultKind::ERRNO, 1 + random() % 6, error);
        fixture.engine->faults().inject(FaultKind::DELAY, 1 + random() % 6, random() % 3);
        std::vector<Ticket> tickets;
        std::vector<Bytes> backs(4, Bytes(3 * BLOCK + 5));
        for (size_t i = 0; i < backs.size(); ++i) {
            tickets.push_back(fixture.submit(false, backs[i].data(), backs[i].size(), 1000 * int64_t(i)));
        }
        int num_failed = 0;
        for (size_t i = 0; i < backs.size(); ++i) {
            int outcome = fixture.finish(tickets[i]);
            CHECK(outcome == 0 || outcome == error);
            num_failed += outcome != 0;
            if (outcome == 0) CHECK(memcmp(backs[i].data(), &content[1000 * i], backs[i].size()) == 0);
        }
        CHECK(num_failed == (error == EINTR ? 0 : 1));
        fixture.engine->faults().clear();
    }
}

void test_close_cancels_what_has_not_started(const EngineOptions& options) {
    Fixture fixture(options, Bytes(BLOCK));
    // All places of all threads' queues are taken by late blocks: whatever comes after them stays queued.
    const size_t num_places =
        (options.queue_depth + options.num_threads - 1) / options.num_threads * options.num_threads;
    Bytes data(num_places * BLOCK, 'd');
    for (uint64_t nth = 1; nth <= num_places; ++nth)
        fixture.engine->faults().inject(FaultKind::DELAY, nth, LONG_MS);
    Ticket first = fixture.submit(true, data.data(), data.size(), 0);
    while (fixture.engine->stats().blocks < num_places) std::this_thread::yield();
    Bytes dropped(100 * BLOCK, 'x');
    std::vector<Ticket> late;
    for (int i = 0; i < 20; ++i)
        late.push_back(fixture.submit(true, dropped.data(), dropped.size(), 1 << 20));
    CHECK(!first->done.is_set());
    fixture.engine->close(true);  // ends the delays
    CHECK_EQUAL(fixture.finish(first), 0);
    for (const Ticket& ticket : late) {
        CHECK_EQUAL(fixture.finish(ticket), ECANCELED);
        CHECK(ticket->released.is_set());
    }
    CHECK_EQUAL(fixture.engine->collect_finished().size(), late.size() + 1);
    CHECK(get(fixture.path) == data);
}

void test_timeout(const EngineOptions& given) {
    EngineOptions options = given;
    options.operation_timeout_ns = 500 * MS;  // a busy machine begins two blocks in less
    Fixture fixture(options, Bytes(4 * BLOCK));
    Bytes memory(4 * BLOCK);
    fixture.engine->faults().inject(FaultKind::DELAY, 2, LONG_MS);
    int64_t begin = now_ns();
    Ticket ticket = fixture.submit(false, memory.data(), memory.size(), 0);
    CHECK_EQUAL(fixture.finish(ticket), ETIMEDOUT);
    CHECK(now_ns() - begin >= 500 * MS);
    // The caller learns of it at once; its memory is busy until the late block is there.
    CHECK(!ticket->released.is_set());
    CHECK(fixture.engine->collect_finished().empty());
    fixture.engine->close(true);  // ends the delay
    CHECK(ticket->released.is_set());
    CHECK_EQUAL(ticket->error(), ETIMEDOUT);
    CHECK_EQUAL(fixture.engine->collect_finished().size(), size_t(1));
}

void test_in_time(const EngineOptions& given) {
    EngineOptions options = given;
    options.operation_timeout_ns = WAIT_NS;
    Fixture fixture(options, Bytes(4 * BLOCK));
    Bytes data(BLOCK);
    CHECK_EQUAL(fixture.finish(fixture.submit(false, data.data(), BLOCK, 0)), 0);
}

void test_close_with_work_in_flight(const EngineOptions& options) {
    for (bool should_cancel : {false, true}) {
        for (int turn = 0; turn < 10; ++turn) {
            Fixture fixture(options, Bytes(BLOCK));
            fixture.engine->faults().inject(FaultKind::DELAY, 1, turn % 3);
            if (turn % 2) fixture.engine->faults().inject(FaultKind::ERRNO, 3, EIO);
            Bytes data(4 * BLOCK + 9, 'w');
            std::atomic<bool> is_over{false};
            std::vector<Ticket> tickets;
            std::thread submitter([&] {
                while (!is_over) {
                    OperationRequest request;
                    request.is_write = true;
                    request.file = fixture.file;
                    request.data = data.data();
                    request.num_bytes = data.size();
                    Ticket ticket;
                    int status = fixture.engine->submit(std::move(request), &ticket);
                    if (status == -ESHUTDOWN) return;
                    CHECK_EQUAL(status, 0);
                    tickets.push_back(ticket);
                    if (tickets.size() > 200) std::this_thread::yield();
                }
            });
            std::this_thread::sleep_for(std::chrono::milliseconds(turn % 4));
            fixture.engine->close(should_cancel);
            is_over = true;
            submitter.join();
            for (const Ticket& ticket : tickets) {
                CHECK(ticket->done.is_set() && ticket->released.is_set());
                CHECK(ticket->error() == 0 || ticket->error() == EIO || ticket->error() == ECANCELED);
                CHECK(should_cancel || ticket->error() != ECANCELED);
            }
            CHECK_EQUAL(fixture.engine->collect_finished().size(), tickets.size());
        }
    }
}

void test_registered_memory(const EngineOptions& options) {
    Bytes content = random_bytes(32 * BLOCK, 7);
    Fixture fixture(options, content);
    constexpr size_t NUM_BYTES = 64 * BLOCK;
    char* memory = static_cast<char*>(aligned_alloc(4096, NUM_BYTES));
    CHECK(memory != nullptr);
    for (int turn = 0; turn < 5; ++turn) {
        int status = fixture.engine->register_buffer(memory, NUM_BYTES);
        bool is_refused = status == -EOPNOTSUPP || status == -ENOMEM || status == -EINVAL;
        CHECK(status == 0 || is_refused);
        CHECK_EQUAL(fixture.engine->stats().registered_bytes, status == 0 ? NUM_BYTES : 0);
        std::vector<Ticket> tickets;
        for (size_t i = 0; i < 2; ++i) {
            tickets.push_back(fixture.submit(false, memory + i * 32 * BLOCK, 32 * BLOCK, 0));
        }
        // Taken back while the transfers are in flight: the kernel keeps what they need.
        std::thread other([&] { CHECK_EQUAL(fixture.engine->unregister_buffer(memory), status == 0); });
        for (const Ticket& ticket : tickets) CHECK_EQUAL(fixture.finish(ticket), 0);
        other.join();
        for (size_t i = 0; i < 2; ++i) {
            CHECK(memcmp(memory + i * 32 * BLOCK, content.data(), content.size()) == 0);
        }
    }
    fixture.engine->register_buffer(memory, NUM_BYTES);
    fixture.engine->close(false);
    CHECK_EQUAL(fixture.engine->stats().registered_bytes, size_t{0});
    free(memory);
}

// More files than slots, opened and closed while others are read: a slot never shows the file it held before.
void test_files_come_and_go(const EngineOptions& options) {
    constexpr int FILES = NUM_FILE_SLOTS + 20;
    Fixture fixture(options);
    int num_before = num_open_descriptors();
    {
        std::vector<std::shared_ptr<File>> files;
        for (int i = 0; i < FILES; ++i) {
            fixture.path = fixture.folder.path("file" + std::to_string(i));
            put(fixture.path, Bytes(4096, static_cast<char>(i)));
            files.push_back(fixture.open_file());
            if (i % 3 == 2) files[static_cast<size_t>(i - 1)].reset();
        }
        for (int turn = 0; turn < 2; ++turn) {
            for (int i = 0; i < FILES; ++i) {
                if (files[static_cast<size_t>(i)] == nullptr) continue;
                char back[4096];
                fixture.file = files[static_cast<size_t>(i)];
                CHECK_EQUAL(fixture.finish(fixture.submit(false, back, sizeof back, 0)), 0);
                CHECK(back[0] == static_cast<char>(i) && back[4095] == static_cast<char>(i));
                if (turn == 0 && i % 5 == 0) files[static_cast<size_t>(i)].reset();
            }
        }
        fixture.file.reset();
    }
    CHECK(num_open_descriptors() < num_before);
}

struct Test {
    const char* name;
    void (*function)(const EngineOptions&);
};

constexpr Test TESTS[] = {
    {"odd sizes and offsets", test_odd_sizes_and_offsets},
    {"threads write side by side", test_threads_write_side_by_side},
    {"short transfers continue", test_short_transfers_continue},
    {"faults end their operation only", test_faults_end_their_operation_only},
    {"close cancels what has not started", test_close_cancels_what_has_not_started},
    {"timeout", test_timeout},
    {"in time", test_in_time},
    {"close with work in flight", test_close_with_work_in_flight},
    {"registered memory", test_registered_memory},
    {"files come and go", test_files_come_and_go},
};

struct Setup {
    const char* name;
    EngineOptions options;
};

std::vector<Setup> setups() {
    std::vector<Setup> all;
    auto add = [&all](const char* name, KernelInterface kernel, unsigned num_threads) -> EngineOptions& {
        Setup setup = {name, EngineOptions()};
        setup.options.kernel = kernel;
        setup.options.queue_depth = 8;
        setup.options.num_threads = num_threads;
        all.push_back(setup);
        return all.back().options;
    };
    add("io_uring", KernelInterface::URING, 1);
    add("io_uring, 3 threads", KernelInterface::URING, 3);
    add("io_uring, plain", KernelInterface::URING, 1).uring = {false, false, false};
    add("native AIO", KernelInterface::NATIVE_AIO, 1);
    add("native AIO, 2 threads", KernelInterface::NATIVE_AIO, 2);
    return all;
}

}  // namespace

void blocks_fit_whole_requests() {
    constexpr size_t KIB = 1024, MIB = 1024 * KIB;
    CHECK_EQUAL(fit_requests(MIB, 1016 * KIB), 1016 * KIB);
    CHECK_EQUAL(fit_requests(4 * MIB, 1016 * KIB), 4064 * KIB);
    CHECK_EQUAL(fit_requests(MIB, 508 * KIB), 1016 * KIB);
    CHECK_EQUAL(fit_requests(MIB, MIB), MIB);
    CHECK_EQUAL(fit_requests(MIB, 2 * MIB), MIB);            // fits into one as it is
    CHECK_EQUAL(fit_requests(1536 * KIB, MIB), 1536 * KIB);  // the rest is no small one
    CHECK_EQUAL(fit_requests(MIB, 0), MIB);
}

int main() {
    blocks_fit_whole_requests();
    int num_before = num_open_descriptors();
    for (const Setup& setup : setups()) {
        std::unique_ptr<Engine> probe;
        int status = Engine::create(setup.options, &probe);
        probe.reset();
        if (status < 0) {
            std::printf("%-22s not available: %s\n", setup.name, strerror(-status));
            continue;
        }
        for (const Test& test : TESTS) {
            int64_t begin = now_ns();
            test.function(setup.options);
            std::printf("%-22s %-36s %6.0f ms\n", setup.name, test.name, double(now_ns() - begin) / 1e6);
            std::fflush(stdout);
        }
    }
    CHECK_EQUAL(num_open_descriptors(), num_before);
    std::printf("fine\n");
}
