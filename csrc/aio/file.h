// A file under the engine: its descriptor, the rules of direct I/O for it, its space.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace offloadzero::aio {

class Registry;

struct OpenOptions {
    bool can_create = false;  // mode 0600; an existing file is kept as it is
    bool is_readonly = false;
    bool can_be_direct = true;  // where the filesystem has direct I/O
    size_t block_size = 0;      // at most; an alignment that does not divide it counts as "no direct I/O"
};

class File {
  public:
    // Returns 0 or -errno.
    static int open(const std::string& path, const OpenOptions& options, std::shared_ptr<File>* file);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    // Called once, before the first transfer: gives the file its slot in the queues of an engine.
    void join(std::shared_ptr<Registry> registry);
    bool is_known_to(const Registry& registry) const { return registry_.get() == &registry; }

    uint64_t id() const { return id_; }  // never used again in this process
    int fd() const { return fd_; }
    int slot() const { return slot_; }
    bool is_direct() const { return is_direct_; }
    // The reason why the file is not direct: -errno of the refusal; 0 when direct or not asked for.
    int direct_refusal() const { return direct_refusal_; }
    // Offsets and lengths of direct writes are multiples of `alignment`: at least a page, so that the page
    // cache (see Note: the end of the file, in worker.cpp) and a direct write never meet in one page.
    size_t alignment() const { return alignment_; }
    size_t read_alignment() const { return read_alignment_; }
    size_t memory_alignment() const { return memory_alignment_; }
    // Long transfers are cut into blocks of this size: [Note: whole requests], in device_limits.h.
    size_t block_size() const { return block_size_; }
    dev_t device() const { return device_; }
    ino_t inode() const { return inode_; }

    int64_t num_bytes() const;  // or -errno
    // The size, which is looked up where `end` is behind the last one that was seen; or -errno.
    int64_t size_to(int64_t end);
    // Allocates bytes [start, num_bytes); returns 0 or -errno. The size afterwards is at least num_bytes. In
    // a range that does not begin at 0, nothing may be allocated yet.
    int preallocate(int64_t start, int64_t num_bytes) const;
    int sync() const;  // fdatasync; 0 or -errno
    // A second, buffered descriptor of the same inode, opened at first use; or -errno.
    int buffered_fd();

  private:
    File();
    int query_alignment(size_t block_size);

    const uint64_t id_;
    std::shared_ptr<Registry> registry_;
    int slot_ = -1;
    std::string path_;
    int fd_ = -1;
    int buffered_fd_ = -1;
    std::mutex buffered_mutex_;
    bool is_readonly_ = false;
    bool is_direct_ = false;
    int direct_refusal_ = 0;
    size_t alignment_ = 1;
    size_t read_alignment_ = 1;
    size_t memory_alignment_ = 1;
    size_t block_size_ = 0;
    dev_t device_ = 0;
    ino_t inode_ = 0;
    std::atomic<int64_t> seen_num_bytes_{0};
};

}  // namespace offloadzero::aio
